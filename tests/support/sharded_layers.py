"""Quantized layers under FSDP2 on 1 to 4 gloo ranks, without verl's engine: one rank of test_sharded_layers.py.

    sharded_layers.py OUTPUT_FILE

Four processes serve all cases. A case with fewer ranks uses a mesh of the first ones. The model has rows and experts
that no number of ranks divides: 10 rows, 3 experts.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.utils.checkpoint import checkpoint

from qarl.errors import UserError
from qarl.kernels import registry
from qarl.kernels.base import PreparedStacks
from qarl.kernels.experts import ReferenceExperts
from qarl.kernels.int4 import MARLIN, from_marlin, to_marlin
from qarl.quant import get_scheme
from qarl.quant.fsdp import quantize_before_sharding, quantize_shards, sharded_wire_tensors
from qarl.schemes.base import Operands

SCHEMES = ("w4a16", "w8a8", "fp8")
WORLDS = (1, 2, 3, 4)
GROUP, HIDDEN, WIDE, ODD, EXPERTS, INTERMEDIATE = 32, 64, 96, 10, 3, 32
IGNORE = ("head",)
OPTIMIZERS: dict[str, Any] = {
    "w4a16": {"foreach": True},
    "w8a8": {"fused": True},
    "fp8": {"foreach": False},
}
"""Ways of AdamW to step. The first two do not advance the version counters of DTensors."""


class Experts(nn.Module):
    """What QaRL reads of transformers' experts, which take long to import."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INTERMEDIATE))
        self.act_fn, self.config = nn.SiLU(), SimpleNamespace(num_experts_per_tok=2)


class Block(nn.Module):
    """A dense feed-forward with an uneven linear beside it, and experts, after a norm that is not quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.wide, self.back = nn.Linear(HIDDEN, WIDE, bias=False), nn.Linear(WIDE, HIDDEN)
        self.odd = nn.Linear(HIDDEN, ODD)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * self.norm
        y = self.back(nn.functional.silu(self.wide(normed)))
        odd = nn.functional.pad(self.odd(normed), (0, HIDDEN - ODD))
        tokens = normed.flatten(0, -2)
        ids = torch.tensor([[0, 1], [1, 0], [2, 1]]).repeat(-(-len(tokens) // 3), 1)[: len(tokens)]
        weights = torch.tensor([0.625, 0.375]).expand(len(tokens), 2)
        y = y + self.experts(tokens, ids, weights).view(x.shape)
        return x + y + odd  # as in Qwen3-MoE, nothing is saved after the experts


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(HIDDEN, 16, bias=False)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def make_model(recompute: bool = False) -> Model:
    """FP32 masters, the same on every rank."""
    torch.manual_seed(7)
    model = Model(recompute)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif name.endswith("norm"):
                parameter.uniform_(0.7, 1.3)
    return model


def make_input(number: int) -> torch.Tensor:
    return torch.randn(
        2, 5, HIDDEN, generator=torch.Generator().manual_seed(100 + number)
    ).bfloat16()


def loss_of(y: torch.Tensor, number: int) -> torch.Tensor:
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(200 + number))
    return (y.float() * weights).sum() / 100


def main() -> None:
    torch.distributed.init_process_group("cpu:gloo")
    rank = torch.distributed.get_rank()
    results: dict[Any, Any] = {}
    for world in WORLDS:
        mesh = torch.distributed.device_mesh.DeviceMesh("cpu", list(range(world)))
        if rank < world:
            for scheme in SCHEMES:
                results[world, scheme] = run_case(mesh, scheme, rank)
            plain, marlin = experts_kernels()
            results[world, "marlin"] = (
                with_kernel(mesh, plain, rank),
                with_kernel(mesh, marlin, rank, True),
            )
        torch.distributed.barrier()
    torch.save(results, f"{sys.argv[1]}.{rank}")
    torch.distributed.destroy_process_group()


class CountingAllGather(DefaultAllGather):
    """FSDP2's own all-gather, which also notes how many bytes each rank sends."""

    sent = 0

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self.sent += input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, group, async_op)


def sharded(mesh: Any, scheme: str | None, model: Any = None) -> tuple[Any, CountingAllGather]:
    """`model`, by default a new one, quantized and sharded, and its all-gather."""
    model = make_model() if model is None else model
    if scheme:
        quantize_before_sharding(
            model, scheme=get_scheme(scheme, GROUP), ignore=IGNORE, device=torch.device("cpu")
        )
    counting = CountingAllGather()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.blocks, model.head, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_custom_all_gather(counting)
    return model, counting


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def publish(model: Any, scheme: str) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        stream = sharded_wire_tensors(
            model,
            scheme=get_scheme(scheme, GROUP),
            ignore=IGNORE,
        )
        return {name: tensor.clone() for name, tensor in stream}


def masters(model: Any) -> dict[str, torch.Tensor]:
    return {name: whole(p).detach().clone() for name, p in model.named_parameters()}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
    }


def refusal(action: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    return ""


def run_case(mesh: Any, scheme: str, rank: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    model, counting = sharded(mesh, scheme)
    by_layer: list[dict[str, torch.Tensor]] = []
    for block in model.blocks:
        for layer in (block.wide, block.odd):
            layer.register_forward_hook(lambda layer, *_: by_layer.append(layer.weight.tensors))
    quantize_shards(model)
    with torch.no_grad():
        report["output"] = model(make_input(0))
    report["sent"] = counting.sent
    report["stored_bytes"] = [
        tensor.untyped_storage().nbytes() for tensors in by_layer for tensor in tensors.values()
    ]
    report["published"] = publish(model, scheme)
    report["changed"] = ""
    if mesh.size() == 1:
        other, _ = sharded(mesh, scheme)
        quantize_shards(other)
        loss = loss_of(other(make_input(0)), 0)
        with torch.no_grad():
            other.blocks[0].wide.weight.mul_(2)
        report["changed"] = refusal(loss.backward, RuntimeError)
    report["gradients"] = step(model, [rank])
    report |= further_steps(model, scheme, rank)
    report["checkpointed"] = through_checkpoints(model, mesh, scheme)
    report["accumulated"] = accumulated(mesh, scheme, rank)
    halved, _ = sharded(mesh, scheme, make_model().bfloat16())
    quantize_shards(halved)
    with torch.no_grad():
        report["bf16_masters"] = halved(make_input(0))
    report["unconverted"] = publish(sharded(mesh, None)[0], scheme)
    with torch.no_grad():
        if rank == 0:
            model.blocks[0].experts.down_proj._local_tensor.fill_(torch.nan)
    report["nan"] = [refusal(lambda: quantize_shards(model), UserError) for _ in range(2)]
    return report


def experts_kernels() -> tuple[Any, Any]:
    """Experts in PyTorch, which read the wire tensors; and the same behind Marlin's layout, which counts."""

    def convert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        Marlin.converted.append(1)
        return to_marlin(tensors)

    class Marlin(ReferenceExperts):
        converted: ClassVar[list[int]] = []
        runs: ClassVar[list[int]] = []
        layout = replace(MARLIN, convert=convert)

        @classmethod
        def forward(cls, *arguments: Any) -> torch.Tensor:
            cls.runs.append(1)
            return super().forward(*arguments)

        @staticmethod
        def prepare(gate_up: Any, down: Any, operands: Operands) -> PreparedStacks:
            return PreparedStacks(from_marlin(gate_up), from_marlin(down), operands)

    return ReferenceExperts, Marlin


def with_kernel(mesh: Any, kernel: Any, rank: int, recompute: bool = False) -> dict[str, Any]:
    """A step with `kernel` for the W4A16 experts, and what is published after it."""
    report: dict[str, Any] = {}
    before = registry.EXPERTS_KERNELS
    registry.EXPERTS_KERNELS = [kernel]
    model, _ = sharded(mesh, "w4a16", make_model(recompute))
    registry.EXPERTS_KERNELS = before
    counts = [getattr(kernel, name, []) for name in ("converted", "runs")]
    for count in counts:
        count.clear()
    quantize_shards(model)
    report["before"] = list(map(len, counts))
    loss = loss_of(model(make_input(rank)), rank)
    loss.backward()
    report["after"] = list(map(len, counts))
    report["loss"], report["gradients"], report["published"] = (
        loss.detach(),
        gradients(model),
        publish(model, "w4a16"),
    )
    return report


def step(model: Any, inputs: list[int]) -> dict[str, torch.Tensor]:
    """Forward and backward of `inputs` one by one. Return their gradients, added up."""
    quantize_shards(model)
    for number in inputs:
        loss_of(model(make_input(number)), number).backward()
    return gradients(model)


def generations(model: Any) -> list[int]:
    return [module.generation for module in model.modules() if hasattr(module, "generation")]


def further_steps(model: Any, scheme: str, rank: int) -> dict[str, Any]:
    """Two optimizer steps, of which the second has two forwards; then the parameters move, as when verl offloads."""
    report: dict[str, Any] = {"before": generations(model)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, **OPTIMIZERS[scheme])
    report["norm"] = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    optimizer.zero_grad()
    step(model, [rank])
    step(model, [rank])
    optimizer.step()
    report["after"] = generations(model)
    quantize_shards(model)
    report["masters"] = masters(model)
    with torch.no_grad():
        report["second_output"] = model(make_input(0))
    report["second_published"] = publish(model, scheme)
    report["third"] = generations(model)
    model._apply(torch.clone)
    layers = [module for module in model.modules() if hasattr(module, "shards")]
    report["moved"] = [shard._buffer is None for layer in layers for shard in layer.shards.values()]
    quantize_shards(model)
    with torch.no_grad():
        report["moved_output"] = model(make_input(0))
    return report


def accumulated(mesh: Any, scheme: str, rank: int) -> list[dict[str, torch.Tensor]]:
    """The gradients of two micro-batches: reduced after each, and only after the last."""
    gradients = []
    for sync in (True, False):
        model, _ = sharded(mesh, scheme)
        if not sync:
            model.set_requires_gradient_sync(False)
            step(model, [rank])
            model.set_requires_gradient_sync(True)
        gradients.append(step(model, [rank, rank + 4] if sync else [rank + 4]))
    return gradients


def through_checkpoints(model: Any, mesh: Any, scheme: str) -> list[dict[str, torch.Tensor]]:
    """What other models publish that got this one's state: from a file for each rank, as verl's, and from PyTorch's
    whole state dict."""
    others = [sharded(mesh, scheme)[0] for _ in range(2)]
    for other in others:
        publish(other, scheme)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "shard.pt")
        others[0].load_state_dict(torch.load(Path(folder) / "shard.pt", weights_only=True))
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(others[1], get_model_state_dict(model, options=options), options=options)
    return [publish(other, scheme) for other in others]


if __name__ == "__main__":
    main()
