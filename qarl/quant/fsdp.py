"""Quantized layers under FSDP2, which shards the FP32 masters but gathers only low-bit tensors for a forward.

    once per optimizer step   each rank quantizes its own rows of each weight (`qarl.quant.weight_shard`)
    forward, backward         FSDP2 gathers codes and scales of one block, and frees them when it reshards the block
    publish                   the same codes and scales are gathered, one layer at a time

So no rank ever has a BF16 copy of a whole quantized weight, or the whole model in low bits. Three things differ from
layers that one process trains (`qarl.quant.linear`):

- If the kernel's layout cannot be gathered (`Layout` of `qarl.kernels.base`), each forward makes it and then drops it.
- Each backward dequantizes the weight.
- The caller must call `quantize_shards` before a forward. It quantizes weights that changed, and makes FSDP2 gather
  them in low bits.

With scheme bf16 nothing is quantized. FSDP2 gathers experts in BF16, and each forward packs them for its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from qarl.errors import UserError
from qarl.kernels.base import from_layout
from qarl.quant import convert
from qarl.quant.experts import STACKS, ExpertsInOneCopy, QuantExperts, QuantizedStack
from qarl.quant.linear import QuantLinear
from qarl.quant.quantize import QuantizedTensor, phase
from qarl.quant.state_dict import unquantized_tensors
from qarl.quant.weight_shard import GatheredWeight, WeightShard
from qarl.schemes import Scheme
from qarl.schemes.kernel_choice import KernelChoice


class _Sharded(nn.Module):
    """Base of both kinds of layers.

    `shards`: parameter name -> shard, for each parameter that is gathered in low bits.
    """

    shards: dict[str, WeightShard]

    @property
    def generation(self) -> int:
        return max((shard.generation for shard in self.shards.values()), default=0)

    @property
    def stale(self) -> bool:
        return any(shard.stale for shard in self.shards.values())

    def invalidate(self) -> None:
        for shard in self.shards.values():
            shard.drop()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Do the same as `nn.Module`, and free the quantized rows of moved parameters.

        verl's `param_offload` moves parameters because it needs the memory.
        """
        super()._apply(fn, recurse)
        for leaf, shard in self.shards.items():
            parameter = self.get_parameter(leaf)
            if isinstance(parameter, DTensor) and not shard.is_attached(parameter):
                shard.drop()
        return self


class ShardedQuantLinear(_Sharded, QuantLinear):
    """A `QuantLinear` whose weight FSDP2 shards and gathers in low bits."""

    def __init__(self, linear: nn.Linear, scheme: Scheme, **options: Any) -> None:
        QuantLinear.__init__(self, linear, scheme, **options)
        self.shards = {"weight": _shard(self, "weight")}

    def make_ready(self) -> None:
        """Do nothing: FSDP2 has gathered the weight."""

    def quantized(self) -> QuantizedTensor:
        """Return the gathered low-bit tensors. This works only during a forward or a backward."""
        with phase("prepare"):
            tensors = from_layout(_gathered(self, "weight"), self.kernel.layout)
        return QuantizedTensor.of(self.scheme, (self.out_features, self.in_features), tensors)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with phase("prepare"):
            prepared = self.kernel.prepare_gathered(_gathered(self, "weight"))
        return self.kernel.linear(x, prepared, bias)

    @property
    def dequantized(self) -> torch.Tensor:
        """The dequantized weight Ŵ, BF16 [N, K]."""
        return self.quantized().dequantize(torch.bfloat16)


class ShardedQuantExperts(_Sharded, QuantExperts):
    """`QuantExperts` whose stacks FSDP2 shards, and gathers in low bits unless the scheme is bf16."""

    def __init__(self, experts: nn.Module, scheme: Scheme, **options: Any) -> None:
        QuantExperts.__init__(self, experts, scheme, **options)
        self.shards = {leaf: _shard(self, leaf) for leaf in STACKS} if scheme.quantized else {}

    def low_bit(self) -> Any:
        gate_up, down = (self._stack(leaf) for leaf in STACKS)
        return ExpertsInOneCopy(self.kernel, gate_up, down, self.scheme.operands)

    def _stack(self, leaf: str) -> dict[str, torch.Tensor]:
        return (
            _gathered(self, leaf) if self.shards else {"weight": self.get_parameter(leaf).detach()}
        )


def _shard(layer: QuantLinear | QuantExperts, leaf: str) -> WeightShard:
    layout = layer.kernel.layout
    shape = tuple(layer.get_parameter(leaf).shape)
    return WeightShard(f"{layer.qualified_name}.{leaf}", layer.scheme, shape, layout=layout)


def _gathered(layer: QuantLinear | QuantExperts, leaf: str) -> dict[str, torch.Tensor]:
    weight = layer.get_parameter(leaf)
    if not isinstance(weight, GatheredWeight):
        raise RuntimeError(
            f"{layer.qualified_name}.{leaf} was not gathered in low bits; call quantize_shards before each forward"
        )
    return weight.tensors


def quantize_before_sharding(
    model: nn.Module,
    *,
    scheme: Scheme,
    ignore: Sequence[str] = convert.DEFAULT_IGNORE,
    kernels: KernelChoice = KernelChoice.ENGINE,
    device: torch.device,
) -> convert.QuantReport:
    """Replace the linears and experts that `scheme` quantizes, in place. Parameters and their names stay the same.

    Call this before `fully_shard`. Masters may be FP32 or on the meta device. `kernels`: a value of `quant.kernels`.
    `device`: where the forward will run.
    """
    selected, skipped = convert.select_linears(model, scheme, ignore)
    classes = ShardedQuantLinear, ShardedQuantExperts
    return convert.replace_selected(
        model, selected, skipped, scheme, ignore, *classes, kernels=kernels, device=device
    )


def quantize_shards(model: nn.Module, device: torch.device | None = None) -> None:
    """Make FSDP2 gather the quantized weights of `model` in low bits, and quantize this rank's rows that have changed.

    All ranks must call this together, after `fully_shard` and before each forward. If a weight changes after this call,
    its next gather raises RuntimeError.

    Args:
        device: where to quantize and to gather. Default: the device of the masters.

    Raises:
        UserError: a weight on this or another rank is NaN or Inf.
    """
    for module in model.modules():
        for leaf, shard in module.shards.items() if isinstance(module, _Sharded) else ():
            parameter = module.get_parameter(leaf)
            if isinstance(parameter, DTensor):  # else it is still gathered, and so it is attached
                shard.attach(parameter)
    shards = [
        shard
        for module in model.modules()
        if isinstance(module, _Sharded)
        for shard in module.shards.values()
    ]
    _together(shards, device)


def weight_shards(model: nn.Module) -> dict[str, WeightShard]:
    """Return the weights of `model` that FSDP2 gathers in low bits, by the names of their parameters."""
    return {
        f"{name}.{leaf}": shard
        for name, module in model.named_modules()
        if isinstance(module, _Sharded)
        for leaf, shard in module.shards.items()
    }


def _together(shards: Sequence[WeightShard], device: torch.device | None) -> None:
    """Quantize `shards`. If this fails on one rank, raise UserError on all ranks.

    The host reads once for all weights whether they have a NaN or an Inf."""
    if not shards:
        return
    failure: UserError | None = None
    flags: list[tuple[WeightShard, torch.Tensor]] = []
    try:
        for shard in shards:
            if (flag := shard.quantize(device)) is not None:
                flags.append((shard, flag))
    except UserError as error:
        failure = error
    bad = torch.cat([flag for _, flag in flags]).tolist() if flags else []
    for (shard, _), nonfinite in zip(flags, bad, strict=True):
        if nonfinite:
            refusal = shard.refuse()
            failure = failure or refusal
    mesh = shards[0].parameter.device_mesh
    rank = torch.full((1,), 0 if failure is None else 1 + mesh.get_rank(), device=mesh.device_type)
    for dim in range(mesh.ndim):
        torch.distributed.all_reduce(
            rank, op=torch.distributed.ReduceOp.MAX, group=mesh.get_group(dim)
        )
    if failure is not None:
        raise failure
    if failed := int(rank):
        raise UserError(
            f"rank {failed - 1} could not quantize its part of the weights",
            fix="see that rank's error",
        )


def gathered(
    tensor: torch.Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the whole of a tensor that FSDP2 may have sharded. All ranks must call this together.

    `device`: where to, by default where the tensor is. `dtype`: what to cast numbers to that are not integers."""
    tensor = tensor.detach()
    if device is not None:
        tensor = tensor.to(device, non_blocking=True)
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_wire_tensors(
    model: nn.Module,
    *,
    scheme: Scheme,
    ignore: Sequence[str] = convert.DEFAULT_IGNORE,
    device: torch.device | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of `qarl.quant.packed_state_dict(model, stacks=True)`, from a model that FSDP2 has sharded.

    All ranks must call this together. One layer is gathered at a time, and quantized weights are gathered in low bits.
    If the model was not converted (`quant.align=off`), each weight is quantized for this publish.

    Args:
        device: where to quantize and to gather. Default: the device of the masters.
    """
    entries = model.state_dict()
    quantize_shards(model, device)
    layers: Mapping[str, nn.Module] = dict(model.named_modules())
    selected = (
        convert.owners(convert.select_linears(model, scheme, ignore)[0]) if scheme.quantized else {}
    )
    tied = convert.tied_names(model)
    for name, entry in entries.items():
        if name in tied:
            continue
        owner, _, leaf = name.rpartition(".")
        if owner not in selected or leaf not in ("weight", *STACKS):
            yield from unquantized_tensors(
                name, gathered(entry, device, torch.bfloat16), stacks=True
            )
            continue
        layer = layers[owner]
        shard = (
            layer.shards[leaf]
            if isinstance(layer, _Sharded)
            else _shard_of(name, entry, scheme, device)
        )
        yield from _named(name, shard.gather(), scheme, tuple(entry.shape))


def _shard_of(
    name: str, entry: DTensor, scheme: Scheme, device: torch.device | None
) -> WeightShard:
    """Quantize this rank's shard of a state-dict entry whose layer was not converted, and return it."""
    shard = WeightShard(name, scheme, tuple(entry.shape))
    shard.attach(entry)
    _together([shard], device)
    return shard


def _named(
    name: str, tensors: dict[str, torch.Tensor], scheme: Scheme, shape: tuple[int, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield checkpoint names and wire tensors of the gathered weight `name`."""
    if len(shape) == 3:
        yield from QuantizedStack(name, scheme, shape, tensors).stacked()
        return
    yield from QuantizedTensor.of(scheme, (shape[0], shape[1]), tensors).named(
        name.rpartition(".")[0]
    )
