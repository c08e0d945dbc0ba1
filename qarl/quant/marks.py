"""Check whether a weight has changed since something was made from it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Mark(NamedTuple):
    """The state of a weight: the parameter, its address, and autograd's version counter, which in-place updates
    advance. A mark keeps its parameter alive. Otherwise a new one could get the same address and the same version."""

    weight: torch.Tensor
    address: int
    version: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> Mark:
        return cls(weight, weight.data_ptr(), weight._version)

    def holds_for(self, weight: torch.Tensor) -> bool:
        return weight is self.weight and weight.data_ptr() == self.address and weight._version == self.version
