"""The phases of one decoder layer's training step, run at real sizes on meta tensors, and the least bytes of each.

    forward     the layer's experts by the engine's kernel (`ENGINE_LAUNCHES`), and its dense products by QaRL's. The
                experts are read as FSDP2 gathered them
    recompute   the experts again, at the end of a checkpointed block
    backward    QaRL's own (`qarl.kernels.experts.autograd`, `qarl.quant.linear`)
    quantize    this rank's shard: BF16 cast of the master, quantizer, the kernel's layout
    gather      FSDP2's all-gather of codes and scales, which runs for a forward and again for its backward
    optimizer   Muon for the shard's matrices, in FP32
    publish     the checksums and records of the layer on both sides, and the receiver's writes of experts

`least` are the bytes that the phase's products cannot avoid: every operand read once, every result written once, and
one pass over each intermediate between two products. Attention, norms and the embeddings are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from qarl.bench.costs.counting import Counting, Counts, counting
from qarl.bench.costs.shards import gather, make_shard
from qarl.checks.model_size import ModelSize, wire_bytes
from qarl.kernels.experts.autograd import TritonExperts, fused_experts
from qarl.kernels.experts.cuda import Experts, VllmCutlassExperts, VllmMarlinExperts, VllmTritonExperts
from qarl.optim.optimizer import MuonAdamW
from qarl.quant.expert_names import STACKS
from qarl.quant.experts import QuantizedStack
from qarl.quant.fsdp import GatheredExperts
from qarl.quant.linear import QuantLinear
from qarl.quant.scheme import Scheme, get_scheme
from qarl.quant.weight_shard import WeightShard
from qarl.rollout.publish.expert_writers import by_parameter, copy_stacks, in_marlins_layout
from qarl.rollout.publish.wire import TensorSpec

BF16 = torch.bfloat16
ENGINE_LAUNCHES = {
    "w4a16": ("moe_align_block_size", "moe_wna16_marlin_gemm", "silu_and_mul", "moe_wna16_marlin_gemm", "moe_sum"),
    "w8a8": ("quantize", "moe_align_block_size", "fused_moe", "silu_and_mul", "quantize", "fused_moe", "moe_sum"),
    "fp8": ("quantize", "permute", "cutlass_moe_mm", "silu_and_mul", "quantize", "cutlass_moe_mm", "unpermute"),
}
"""What vLLM 0.24.0 launches for a layer of experts (fused_marlin_moe, TritonExperts, run_cutlass_moe_fp8)."""
ENGINE_KERNELS: dict[str, Any] = {"w4a16": VllmMarlinExperts, "w8a8": VllmTritonExperts, "fp8": VllmCutlassExperts}
"""QaRL's kernels for experts on a GPU of capability 9.0."""


@dataclass(frozen=True)
class Phase:
    """One phase of one layer. `counts`: what it does. `least`: the least bytes that it could move."""

    name: str
    counts: Counts
    least: int
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """T tokens to k of E experts [2I, H] and [H, I]."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int

    @classmethod
    def of(cls, size: ModelSize, tokens: int = 1) -> Sizes:
        return cls(tokens, size.experts_per_token, size.experts, size.hidden, size.moe_intermediate)


def expert_phases(size: ModelSize, scheme_name: str, group_size: int, tokens: int) -> list[Phase]:
    """Count forward, recomputation and backward of a layer's experts on a GPU of capability 9.0."""
    sizes, scheme = Sizes.of(size, tokens), get_scheme(scheme_name, group_size)
    x, weights = _empty(tokens, sizes.hidden).requires_grad_(), _empty(tokens, sizes.top_k, dtype=torch.float32)
    ids = _empty(tokens, sizes.top_k, dtype=torch.int64)
    shapes = stack_shapes(sizes)
    gate_up, down = (_empty(*shape).requires_grad_() for shape in shapes)
    with counting():
        shards = [make_shard(shape, scheme, ENGINE_KERNELS[scheme_name], 1) for shape in shapes]
        for shard in shards:
            shard.quantize()
        gathered = gather(shards)
    runs: list[Counting] = []

    def block(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with counting() as counter:
            runs.append(counter)
            experts = GatheredExperts(_engine(scheme_name, counter, sizes), *gathered)
            return fused_experts(x, weights, ids, gate_up, down, experts)

    inputs = x, weights.requires_grad_()
    y = block(*inputs)
    with counting() as backward:
        y.backward(torch.empty_like(y))
    runs.clear()
    again = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
    with counting():
        again.backward(torch.empty_like(again))
    least = _least_forward(sizes, scheme_name, group_size)
    return [
        _phase("forward", runs[0], least),
        _phase("recompute", runs[1], 0),
        _phase("backward", backward, _least_backward(sizes, scheme_name, group_size)),
    ]


def dense_phases(size: ModelSize, scheme_name: str, group_size: int, tokens: int) -> list[Phase]:
    """Count forward and backward of a layer's dense products. Each reads its own input."""
    scheme = get_scheme(scheme_name, group_size)
    shapes = dense_shapes(size)
    with counting():
        layers = [_linear(shape, scheme) for shape in shapes]
    inputs = [_empty(tokens, shape[1]).requires_grad_() for shape in shapes]
    with counting() as counter:
        outputs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    rows = sum(2 * tokens * (n + k) for n, k in shapes)
    weights = sum(wire_bytes(scheme_name, group_size, shape) for shape in shapes)
    forward = _phase("forward, dense", counter, rows + weights)
    with counting() as counter:
        torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])
    # dX reads dy and the weight, dW reads dy and x; dX and dW are written
    gradients = sum(2 * tokens * (2 * n + 2 * k) + 2 * n * k for n, k in shapes)
    return [forward, _phase("backward, dense", counter, gradients + weights)]


def _linear(shape: tuple[int, int], scheme: Scheme) -> QuantLinear:
    linear = torch.nn.Linear(shape[1], shape[0], bias=False, device="meta", dtype=BF16)
    layer = QuantLinear(linear, scheme, qualified_name="layer", kernel="triton")
    layer.make_ready()
    return layer


def dense_shapes(size: ModelSize) -> list[tuple[int, int]]:
    """[N, K] of a layer's weights that are not experts'."""
    return [shape for name, shape in size.block_linears(0).items() if ".experts." not in name]


def shard_shapes(size: ModelSize, ranks: int) -> list[tuple[int, ...]]:
    """Shapes of one rank's part of a layer's weights: whole experts, and rows of the other weights."""
    stacks = stack_shapes(Sizes.of(size)) if size.experts else []
    return [(-(-shape[0] // ranks), *shape[1:]) for shape in (*stacks, *dense_shapes(size))]


def stack_shapes(sizes: Sizes) -> list[tuple[int, int, int]]:
    """[E, 2I, H] and [E, H, I]."""
    return [
        (sizes.experts, 2 * sizes.intermediate, sizes.hidden),
        (sizes.experts, sizes.hidden, sizes.intermediate),
    ]


def wire(shape: tuple[int, ...], scheme: Scheme) -> dict[str, torch.Tensor]:
    """The wire tensors of a weight of `shape` [..., N, K], on the meta device."""
    *lead, columns = shape
    if scheme.format == "pack-quantized":
        groups = columns // (scheme.group_size or columns)
        return {"weight_packed": _empty(*lead, columns // 8, dtype=torch.int32), "weight_scale": _empty(*lead, groups)}
    if not scheme.quantized:
        return {"weight": _empty(*shape)}
    dtype = torch.int8 if scheme.name == "w8a8" else torch.float8_e4m3fn
    return {"weight": _empty(*shape, dtype=dtype), "weight_scale": _empty(*lead, 1, dtype=torch.float32)}


def _empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _phase(name: str, counter: Counting, least: int) -> Phase:
    return Phase(name, counter.counts, least, tuple(counter.names))


def _engine(scheme_name: str, counter: Counting, sizes: Sizes) -> Any:
    """A kernel that prepares as the engine's, and reports its launches instead of making them."""
    engines: Any = ENGINE_KERNELS[scheme_name]

    class Engine(engines):
        quantize = TritonExperts.quantize

        @classmethod
        def forward(
            cls, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, prepared: Experts
        ) -> torch.Tensor:
            gate_up, down = prepared[::2], prepared[1::2]
            rows = topk_ids.numel()
            h, a = _empty(rows, 2 * sizes.intermediate), _empty(rows, sizes.intermediate)
            out, y = _empty(rows, sizes.hidden), torch.empty_like(x)
            products = iter(((x, *gate_up, h), (a, *down, out)))
            inputs = iter((x, a))
            for name in ENGINE_LAUNCHES[scheme_name]:
                operands: dict[str, Any] = {
                    "moe_align_block_size": (topk_ids,),
                    "permute": (x, _empty(rows, sizes.hidden)),
                    "silu_and_mul": (h, a),
                    "moe_sum": (out, y),
                    "unpermute": (out, y),
                }
                if name == "quantize":
                    source = next(inputs)
                    counter.launched(name, (source, torch.empty_like(source, dtype=torch.int8)))
                else:
                    counter.launched(name, operands[name] if name in operands else next(products))
            return y

    return Engine


def quantize_phase(size: ModelSize, scheme_name: str, group_size: int, ranks: int) -> Phase:
    """Count the quantizer on one rank's part of a layer: FP32 masters, cast to BF16.

    The host reads once for the whole model whether a weight is NaN or Inf, which is not counted."""
    counter, least = _quantized(size, scheme_name, group_size, ranks)[1], 0
    for shape in shard_shapes(size, ranks):
        rows, columns = math.prod(shape[:-1]), shape[-1]
        least += 4 * rows * columns + wire_bytes(scheme_name, group_size, (rows, columns))
    return _phase("quantize", counter, least)


def gather_phase(size: ModelSize, scheme_name: str, group_size: int, ranks: int) -> Phase:
    """Count one gather of a layer. `least`: the bytes that a rank receives, its own part among them."""
    shards, _ = _quantized(size, scheme_name, group_size, ranks)
    with counting() as counter:
        found = gather(shards, counter)
    return _phase("gather", counter, sum(tensor.nbytes for each in found for tensor in each.values()))


def _quantized(size: ModelSize, scheme_name: str, group_size: int, ranks: int) -> tuple[list[WeightShard], Counting]:
    """One rank's part of a layer, quantized, and the counts of that."""
    scheme, stacks = get_scheme(scheme_name, group_size), stack_shapes(Sizes.of(size)) if size.experts else []
    shards = [make_shard(shape, scheme, ENGINE_KERNELS[scheme_name], ranks) for shape in stacks]
    shards += [make_shard(shape, scheme, None, ranks) for shape in dense_shapes(size)]
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
    experts, dense = _muon(stacks), _muon(dense_shapes(size))
    counts = Counts(experts.counts.kernels + -(-dense.counts.kernels // ranks),
                    moved=experts.counts.moved + dense.counts.moved // ranks)  # fmt: skip
    weights = sum(math.prod(shape) for shape in stacks) + sum(n * k for n, k in dense_shapes(size)) // ranks
    return Phase("optimizer", counts, 20 * weights, tuple(experts.names + dense.names)), weights


def _muon(shapes: Sequence[tuple[int, ...]]) -> Counting:
    """Count a step of Muon for parameters of `shapes`. Their momentum is there already."""
    parameters = [
        (f"mlp.experts.{i}", torch.nn.Parameter(_empty(*shape, dtype=torch.float32))) for i, shape in enumerate(shapes)
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
    from qarl.rollout.publish.send import encode_publish

    tensors = _published(size, scheme_name, group_size)
    for version in (1, 2):  # the tables for tensors of these sizes, which the first makes, stay
        with counting() as counter:
            list(encode_publish(tensors, version=version))
    return _phase("publish, sender", counter, sum(tensor.nbytes for _, tensor in tensors))


def receive_phase(size: ModelSize, scheme_name: str, group_size: int) -> Phase:
    """Count the receiver's part of a layer: checksums, their comparison, and the experts' bytes into vLLM's storage.

    The dense weights, which vLLM's reload writes, are not counted as written. `least`: all tensors are read once, and
    experts are also read and written."""
    from qarl.rollout.publish.receive import WeightReceiver
    from qarl.rollout.publish.send import encode_publish

    tensors, plan = _published(size, scheme_name, group_size), _ExpertsPlan(scheme_name)
    receiver = WeightReceiver(torch.nn.Module(), None, {}, kv_caches=list)
    receiver.expected = {name: TensorSpec.of(tensor) for name, tensor in tensors}
    receiver.plan = plan  # type: ignore[assignment]  # it only writes
    for version in (1, 2):
        with counting():
            stream = list(encode_publish(tensors, version=version))
        with counting() as counter:
            receiver.feed(stream)
    least = sum(tensor.nbytes * (3 if ".experts." in name else 1) for name, tensor in tensors)
    return _phase("publish, receiver", counter, least)


class _ExpertsPlan:
    """The part of `WritePlan` that writes experts on a GPU, into tensors of vLLM's shapes."""

    def __init__(self, scheme_name: str) -> None:
        self.convert = in_marlins_layout if scheme_name == "w4a16" else dict
        self.layer: Any = None

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            if ".experts." in name:
                parts.setdefault(owner, {})[leaf] = tensor
        if not parts:
            return
        made = [self.convert(part) for part in parts.values()]
        if self.layer is None:
            stored = {name: torch.empty_like(tensor) for name, tensor in by_parameter(made).items()}
            self.layer = SimpleNamespace(**stored)
        copy_stacks(self.layer, made)


def _published(size: ModelSize, scheme_name: str, group_size: int) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a layer as they are published, on the meta device, shapes on the host."""
    scheme, prefix = get_scheme(scheme_name, group_size), "model.layers.0."
    tensors: list[tuple[str, torch.Tensor]] = []
    stacks = zip(STACKS, stack_shapes(Sizes.of(size)), strict=True) if size.experts else ()
    for leaf, shape in stacks:
        made = wire(shape, scheme)
        tensors += QuantizedStack(f"{prefix}mlp.experts.{leaf}", scheme, shape, made).stacked()
    for name, dense in size.block_linears(0).items():
        if ".experts." not in name:
            made = wire(dense, scheme) | ({"weight_shape": torch.tensor(dense)} if scheme_name == "w4a16" else {})
            tensors += [(f"{name}.{leaf}", tensor) for leaf, tensor in made.items()]
    if size.experts:
        tensors.append((f"{prefix}mlp.gate.weight", _empty(size.experts, size.hidden)))
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), size.hidden)
    norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), size.head_dim) if size.qk_norm else {}
    return tensors + [(f"{prefix}{name}.weight", _empty(width)) for name, width in norms.items()]


def _stacks_bytes(sizes: Sizes, scheme: str, group_size: int) -> tuple[int, int]:
    (e, n, k), (_, hidden, inner) = stack_shapes(sizes)
    return e * wire_bytes(scheme, group_size, (n, k)), e * wire_bytes(scheme, group_size, (hidden, inner))


def _rows(sizes: Sizes) -> tuple[int, int, int]:
    """Return the bytes of T k rows in BF16 that are H, 2I and I wide."""
    rows = 2 * sizes.tokens * sizes.top_k
    return rows * sizes.hidden, rows * 2 * sizes.intermediate, rows * sizes.intermediate


def _least_forward(sizes: Sizes, scheme: str, group_size: int) -> int:
    """x and both stacks read, gate and up, their product and the experts' outputs once each way, y written."""
    gate_up, down = _stacks_bytes(sizes, scheme, group_size)
    hidden, both, inner = _rows(sizes)
    return 4 * sizes.tokens * sizes.hidden + gate_up + down + 2 * (both + inner + hidden)


def _least_backward(sizes: Sizes, scheme: str, group_size: int) -> int:
    """Five products and what lies between them.

    x and dy are gathered into rows by expert; [g u] = x Ŵgu^T and da = dy Ŵd; one pass makes a and d[g u] from g, u and
    da; dWd from dy and a; dx's rows from d[g u] and Ŵgu, summed by token; dWgu from d[g u] and x. Each stack is read in
    low bits, each gradient of a stack is written in BF16.
    """
    gate_up, down = _stacks_bytes(sizes, scheme, group_size)
    hidden, both, inner = _rows(sizes)
    (e, n, k), (_, out, inside) = stack_shapes(sizes)
    gathers = 4 * hidden
    again = hidden + gate_up + both + hidden + down + inner
    between = both + inner + both + inner
    d_down = hidden + inner + 2 * e * out * inside
    d_x = both + gate_up + hidden + hidden + 2 * sizes.tokens * sizes.hidden
    d_gate_up = both + hidden + 2 * e * n * k
    return gathers + again + between + d_down + d_x + d_gate_up
