"""Quantized layers under FSDP2, which shards the FP32 masters and gathers a BF16 copy of a weight for each forward.

Two things differ from `qarl.quant.linear`:

- FSDP frees and refills the storage of the gathered weight, and autograd's version counter does not count its writes.
  So these layers cannot see that a weight has changed. Code that changes weights (an optimizer step, loading a
  checkpoint) must call `invalidate_quantized`. The next forward or publish then makes new quantized tensors.
- Each backward makes the dequantized weight again. Keeping it would need the memory of a second, unsharded model.

The quantizer gets the master's BF16 cast, as the forward does. Casting before or after the gather gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from qarl.quant import convert
from qarl.quant.experts import QuantExperts, QuantizedStack
from qarl.quant.linear import QuantLinear
from qarl.quant.scheme import Scheme
from qarl.quant.stacks import STACKS, unstacked
from qarl.quant.tensor import QuantizedTensor


class ShardedQuantLinear(QuantLinear):
    """A `QuantLinear` whose quantized tensors stay valid until `invalidate`."""

    def quantized(self) -> QuantizedTensor:
        """Return the low-bit tensors. If they do not exist yet, call this only in a forward, after the gather."""
        return self.adopt(self.weight.detach())

    def adopt(self, weight: torch.Tensor) -> QuantizedTensor:
        """Quantize the gathered BF16 `weight` [N, K] for the next forwards, unless it is already quantized."""
        if self._quantized is None:
            self._quantized = self._make(weight)
        return self._quantized

    @property
    def dequantized(self) -> torch.Tensor:
        """The dequantized weight Ŵ, BF16 [N, K]."""
        return self.quantized().dequantize(torch.bfloat16)

    @property
    def stale(self) -> bool:
        return self._quantized is None


class ShardedQuantExperts(QuantExperts):
    """`QuantExperts` whose quantized tensors stay valid until `invalidate`. With scheme bf16 nothing is quantized: the
    kernel reads FSDP's own parameters, which FSDP frees after a forward and gathers again before the backward."""

    def quantized(self) -> dict[str, QuantizedStack]:
        """Return both stacks. If they do not exist yet, call this only in a forward, after the gather."""
        for leaf in STACKS:
            self.adopt(leaf, self.get_parameter(leaf).detach())
        return self._quantized

    @property
    def stale(self) -> bool:
        return self._low_bit is None


def quantize_before_sharding(
    model: nn.Module, *, scheme: Scheme, ignore: Sequence[str] = convert.DEFAULT_IGNORE, device: torch.device
) -> convert.QuantReport:
    """Replace the linears and experts that `scheme` quantizes, in place. Parameters and their names stay the same.

    Call this before `fully_shard`. Masters may be FP32 or on the meta device. `device`: where the forward will run.
    """
    selected, skipped = convert.select_linears(model, scheme, ignore)
    classes = ShardedQuantLinear, ShardedQuantExperts
    return convert.replace_selected(model, selected, skipped, scheme, ignore, *classes, device=device)


def sharded_wire_tensors(
    model: nn.Module, gather: Any, *, scheme: Scheme, ignore: Sequence[str] = convert.DEFAULT_IGNORE
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of `qarl.quant.packed_state_dict`, from a model that FSDP2 has sharded.

    All ranks must call this together. One layer is gathered at a time. `gather`: a function that takes a sharded
    state-dict entry and returns the whole tensor in BF16 on every rank.
    """
    layers: Mapping[str, nn.Module] = dict(model.named_modules())
    selected = convert.owners(convert.select_linears(model, scheme, ignore)[0]) if scheme.quantized else {}
    tied = convert.tied_names(model)
    for name, entry in model.state_dict().items():
        if name in tied:
            continue
        owner, _, leaf = name.rpartition(".")
        whole = gather(entry)
        layer = layers[owner]
        if owner not in selected or leaf not in ("weight", *STACKS):
            yield from unstacked([(name, whole)])
        elif isinstance(layer, ShardedQuantLinear):
            yield from layer.adopt(whole).named(owner)
        elif isinstance(layer, ShardedQuantExperts):
            yield from layer.adopt(leaf, whole).named()
        else:
            yield from convert.packed_tensor(name, whole, scheme)
