"""Quantized linears under FSDP2, which owns the weights: it shards the FP32 masters and gathers a BF16 copy for a
forward.

Two things differ from `qarl.quant.linear`:

- The gathered weight is one parameter object whose storage comes and goes, and FSDP hides its writes from autograd's
  version counter. So nothing here can see that a weight has changed: whoever changes weights (an optimizer step, a
  loaded checkpoint) says so with `invalidate_quantized`. In between, the quantized tensors are made once, by whichever
  comes first, a forward or a publish, and serve both.
- The dequantized weight is made again in each backward: kept, it would be the unsharded model a second time.

What is quantized is the BF16 cast of the master, which is what the forward is given: a cast and a gather commute.
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
    """A `QuantLinear` whose quantized tensors hold until `invalidate`."""

    def quantized(self) -> QuantizedTensor:
        """The low-bit tensors. Only inside a forward, where FSDP has gathered the weight, can they be made here."""
        return self.adopt(self.weight.detach())

    def adopt(self, weight: torch.Tensor) -> QuantizedTensor:
        """Quantize the gathered BF16 `weight` [N, K] for the next forwards, unless that is done already."""
        if self._quantized is None:
            self._quantized = self._make(weight)
        return self._quantized

    @property
    def dequantized(self) -> torch.Tensor:
        """Ŵ [N, K] in BF16."""
        return self.quantized().dequantize(torch.bfloat16)

    @property
    def stale(self) -> bool:
        return self._quantized is None


class ShardedQuantExperts(QuantExperts):
    """`QuantExperts` whose quantized tensors stay valid until `invalidate`. Under scheme bf16 they are FSDP's own
    parameters, which FSDP frees after a forward and gathers again before the backward."""

    def quantized(self) -> dict[str, QuantizedStack]:
        """Return both stacks. They can be made here only in a forward, when FSDP has gathered the weights."""
        for leaf in STACKS:
            self.adopt(leaf, self.get_parameter(leaf).detach())
        return self._quantized

    @property
    def stale(self) -> bool:
        return self._low_bit is None


def quantize_before_sharding(
    model: nn.Module, *, scheme: Scheme, ignore: Sequence[str] = convert.DEFAULT_IGNORE, device: torch.device
) -> convert.QuantReport:
    """Replace the selected linears of `model`, in place, before `fully_shard`; parameters and their names stay.

    Masters may be FP32 or on the meta device. `device`: where the forward will run.
    """
    selected, skipped = convert.select_linears(model, scheme, ignore)
    classes = ShardedQuantLinear, ShardedQuantExperts
    return convert.replace_selected(model, selected, skipped, scheme, ignore, *classes, device=device)


def sharded_wire_tensors(
    model: nn.Module, gather: Any, *, scheme: Scheme, ignore: Sequence[str] = convert.DEFAULT_IGNORE
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `qarl.quant.packed_state_dict`, for a model sharded by FSDP2; a collective, one layer at a time.

    `gather` makes a whole BF16 tensor of a state-dict entry, on every rank. Floating-point tensors travel in BF16.
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
