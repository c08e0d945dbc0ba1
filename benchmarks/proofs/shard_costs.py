"""One rank's part of a layer between two steps, on meta tensors: quantizer, gather, optimizer, publish.

    quantize    this rank's shard: BF16 cast of the master, quantizer, the kernel's layout
    gather      FSDP2's all-gather of codes and scales, which runs for a forward and again for its backward
    optimizer   Muon for the shard's matrices, in FP32
    publish     the checksums and records of the layer on both sides, and the receiver's writes of experts

`qarl.quant.weight_shard` does the work. FSDP2 itself is stood in for by what the shard reads of a DTensor, and by the
three kernels of a gather (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py): one copies all tensors of a block
into one buffer, NCCL gathers the buffer, and one copies the tensors out of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Shard

from benchmarks.proofs.counting import Counting, Counts, counting
from qarl.bench.plan.traffic import dense_linears
from qarl.checks.model_size import ModelSize
from qarl.kernels.cuda.vllm_experts import VllmCutlassExperts, VllmMarlinExperts, VllmTritonExperts
from qarl.optim.muon_adamw import MuonAdamW
from qarl.quant.experts import STACKS, QuantizedStack
from qarl.quant.quantize import quantize_unchecked
from qarl.quant.weight_shard import WeightShard
from qarl.rollout.publish.experts import by_parameter, copy_stacks, in_marlins_layout
from qarl.rollout.publish.manifest import TensorSpec
from qarl.schemes import Scheme, get_scheme

ENGINE_KERNELS: dict[str, Any] = {
    "w4a16": VllmMarlinExperts,
    "w8a8": VllmTritonExperts,
    "fp8": VllmCutlassExperts,
}
"""QaRL's kernels for experts on a GPU of capability 9.0."""


@dataclass(frozen=True)
class Phase:
    """One phase of one layer. `counts`: what it does. `least`: the least bytes that it could move."""

    name: str
    counts: Counts
    least: int
    kernels: tuple[str, ...]

    @classmethod
    def of(cls, name: str, counter: Counting, least: int) -> Phase:
        return cls(name, counter.counts, least, tuple(counter.names))


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def shard_shapes(size: ModelSize, ranks: int) -> list[tuple[int, ...]]:
    """Shapes of one rank's part of a layer's weights: whole experts, and rows of the other weights."""
    stacks = stack_shapes(size)
    return [(-(-shape[0] // ranks), *shape[1:]) for shape in (*stacks, *dense_linears(size))]


def stack_shapes(size: ModelSize) -> list[tuple[int, int, int]]:
    """[E, 2I, H] and [E, H, I] of a layer's stacks of experts, if it has any."""
    e = size.experts
    hidden = size.hidden
    inner = size.moe_intermediate
    return [(e, 2 * inner, hidden), (e, hidden, inner)] if e else []


def wire(shape: tuple[int, ...], scheme: Scheme) -> dict[str, torch.Tensor]:
    """The wire tensors of a weight of `shape` [..., N, K], on the meta device."""
    if not scheme.quantized:
        return {"weight": on_meta(*shape)}
    with counting():
        quantized, _ = quantize_unchecked(
            on_meta(math.prod(shape[:-1]), shape[-1]), scheme, name="weight"
        )
    return {
        name: tensor.view(*shape[:-1], -1)
        for name, tensor in quantized.tensors.items()
        if name != "weight_shape"
    }


def make_shard(shape: tuple[int, ...], scheme: Scheme, kernel: Any, ranks: int) -> WeightShard:
    """Return rank 0's part of a weight of `shape` that `ranks` ranks share. Its FP32 master is there."""
    mesh = SimpleNamespace(ndim=1, size=lambda dim=0: ranks)
    master = torch.empty(-(-shape[0] // ranks), *shape[1:], device="meta")
    parameter: Any = SimpleNamespace(
        placements=(Shard(0),), device_mesh=mesh, _version=0, _local_tensor=master
    )
    shard = WeightShard("weight", scheme, shape, layout=kernel.layout if kernel else None)
    shard.attach(parameter)
    return shard


def gather(
    shards: Sequence[WeightShard], counter: Counting | None = None
) -> list[dict[str, torch.Tensor]]:
    """Gather `shards`, which are quantized, as one block, and return the tensors that the layer reads of each.

    `counter`: counts the kernels, if given."""
    mesh = shards[0].parameter.device_mesh
    ranks = mesh.size()
    sent = [shard.fsdp_pre_all_gather(mesh)[0] for shard in shards]
    received = [
        tuple(tensor.new_empty(ranks * len(tensor), *tensor.shape[1:]) for tensor in each)
        for each in sent
    ]
    if counter is not None:
        flat = sum(tensor.nbytes for each in sent for tensor in each)
        source = torch.empty(flat, dtype=torch.uint8, device="meta")
        target = torch.empty(ranks * flat, dtype=torch.uint8, device="meta")
        counter.launched(
            "all_gather_copy_in", [source, *(tensor for each in sent for tensor in each)]
        )
        counter.launched("all_gather", [source, target])
        counter.launched(
            "split_with_sizes_copy", [target, *(tensor for each in received for tensor in each)]
        )
    gathered = []
    for shard, tensors in zip(shards, received, strict=True):
        wrapped = shard.fsdp_post_all_gather(tensors, None, torch.bfloat16)
        assert wrapped is not None
        gathered.append(wrapped[0].tensors)
    return gathered


def quantize_phase(size: ModelSize, scheme_name: str, group_size: int, ranks: int) -> Phase:
    """Count the quantizer on one rank's part of a layer: FP32 masters, cast to BF16.

    The host reads once for the whole model whether a weight is NaN or Inf, which is not counted."""
    counter = _quantized(size, scheme_name, group_size, ranks)[1]
    least = 0
    for shape in shard_shapes(size, ranks):
        rows = math.prod(shape[:-1])
        columns = shape[-1]
        least += 4 * rows * columns + get_scheme(scheme_name, group_size).wire_bytes(rows, columns)
    return Phase.of("quantize", counter, least)


def gather_phase(size: ModelSize, scheme_name: str, group_size: int, ranks: int) -> Phase:
    """Count one gather of a layer. `least`: the bytes that a rank receives, its own part among them."""
    shards, _ = _quantized(size, scheme_name, group_size, ranks)
    with counting() as counter:
        gathered = gather(shards, counter)
    return Phase.of(
        "gather", counter, sum(tensor.nbytes for each in gathered for tensor in each.values())
    )


def _quantized(
    size: ModelSize, scheme_name: str, group_size: int, ranks: int
) -> tuple[list[WeightShard], Counting]:
    """One rank's part of a layer, quantized, and the counts of that."""
    scheme = get_scheme(scheme_name, group_size)
    shards = [
        make_shard(shape, scheme, ENGINE_KERNELS[scheme_name], ranks)
        for shape in stack_shapes(size)
    ]
    shards += [make_shard(shape, scheme, None, ranks) for shape in dense_linears(size)]
    with counting() as counter:
        for shard in shards:
            shard.quantize()
    return shards, counter


def optimizer_phase(size: ModelSize, ranks: int) -> tuple[Phase, int]:
    """Count Muon on one rank's part of a layer. Return the phase and the number of this rank's weights.

    Each rank orthogonalizes its own experts in one batch. Of the other matrices it takes every `ranks`-th, so their
    counts are divided by `ranks`. `least`: gradient, momentum and master read, the latter two written, all in FP32.
    """
    stacks = [shape for shape in shard_shapes(size, ranks) if len(shape) == 3]
    experts = _muon(stacks)
    dense = _muon(dense_linears(size))
    counts = Counts(experts.counts.kernels + -(-dense.counts.kernels // ranks),
                    moved=experts.counts.moved + dense.counts.moved // ranks)  # fmt: skip
    weights = (
        sum(math.prod(shape) for shape in stacks)
        + sum(n * k for n, k in dense_linears(size)) // ranks
    )
    return Phase("optimizer", counts, 20 * weights, tuple(experts.names + dense.names)), weights


def _muon(shapes: Sequence[tuple[int, ...]]) -> Counting:
    """Count a step of Muon for parameters of `shapes`. Their momentum is there already."""
    parameters = [
        (f"mlp.experts.{i}", torch.nn.Parameter(on_meta(*shape, dtype=torch.float32)))
        for i, shape in enumerate(shapes)
    ]
    if not parameters:
        return Counting()
    optimizer = MuonAdamW(parameters, lr=1e-6, muon_lr=1e-6)
    for _, parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    with counting() as counter:
        optimizer.step()
    return counter


def publish_phase(size: ModelSize, scheme_name: str, group_size: int) -> Phase:
    """Count the sender's part of a layer: names, checksums, NaN and Inf, and records."""
    from qarl.rollout.remote.wire import encode_publish

    tensors = _published(size, scheme_name, group_size)
    for version in (1, 2):  # the tables for tensors of these sizes, which the first makes, stay
        with counting() as counter:
            list(encode_publish(tensors, version=version))
    return Phase.of("publish, sender", counter, sum(tensor.nbytes for _, tensor in tensors))


def receive_phase(size: ModelSize, scheme_name: str, group_size: int) -> Phase:
    """Count the receiver's part of a layer: checksums, their comparison, and the experts' bytes into vLLM's storage.

    The dense weights, which vLLM's reload writes, are not counted as written. `least`: all tensors are read once, and
    experts are also read and written."""
    from qarl.rollout.publish.transaction import EngineWeights
    from qarl.rollout.remote.receive import StreamReceiver
    from qarl.rollout.remote.wire import encode_publish

    tensors = _published(size, scheme_name, group_size)
    plan = _ExpertsPlan(scheme_name)
    weights = EngineWeights(torch.nn.Module(), None, {}, kv_caches=list)
    weights.expected = {name: TensorSpec.of(tensor) for name, tensor in tensors}
    receiver = StreamReceiver(weights)
    weights.plan = plan  # type: ignore[assignment]  # it only writes
    for version in (1, 2):
        with counting():
            stream = list(encode_publish(tensors, version=version))
        with counting() as counter:
            receiver.feed(stream)
    least = sum(tensor.nbytes * (3 if ".experts." in name else 1) for name, tensor in tensors)
    return Phase.of("publish, receiver", counter, least)


class _ExpertsPlan:
    """The part of `WritePlan` that writes experts on a GPU, into tensors of vLLM's shapes."""

    def __init__(self, scheme_name: str) -> None:
        self.convert = in_marlins_layout if scheme_name == "w4a16" else dict
        self.layer: Any = None
        self.written: set[Any] = set()

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            if ".experts." in name:
                parts.setdefault(owner, {})[leaf] = tensor
        if not parts:
            return
        stacks = [self.convert(part) for part in parts.values()]
        if self.layer is None:
            stored = {
                name: torch.empty_like(tensor) for name, tensor in by_parameter(stacks).items()
            }
            self.layer = SimpleNamespace(**stored)
        copy_stacks(self.layer, stacks)


def _published(
    size: ModelSize, scheme_name: str, group_size: int
) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a layer as they are published, on the meta device, shapes on the host."""
    scheme = get_scheme(scheme_name, group_size)
    prefix = "model.layers.0."
    tensors: list[tuple[str, torch.Tensor]] = []
    for leaf, shape in zip(STACKS, stack_shapes(size), strict=False):
        sent = wire(shape, scheme)
        tensors += QuantizedStack(f"{prefix}mlp.experts.{leaf}", scheme, shape, sent).stacked()
    for name, dense in size.block_linears(0).items():
        if ".experts." not in name:
            sent = wire(dense, scheme) | (
                {"weight_shape": torch.tensor(dense)} if scheme_name == "w4a16" else {}
            )
            tensors += [(f"{name}.{leaf}", tensor) for leaf, tensor in sent.items()]
    if size.experts:
        tensors.append((f"{prefix}mlp.gate.weight", on_meta(size.experts, size.hidden)))
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), size.hidden)
    norms |= (
        dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), size.head_dim)
        if size.qk_norm
        else {}
    )
    return tensors + [(f"{prefix}{name}.weight", on_meta(width)) for name, width in norms.items()]
