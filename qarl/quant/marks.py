"""Whether a weight is still the one that something was made from."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Mark(NamedTuple):
    """A weight as it was: the parameter, its address, and autograd's version counter, which every in-place update
    advances. The parameter itself is held on to: a new one may get the freed address and start at the same version.
    """

    weight: torch.Tensor
    address: int
    version: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> Mark:
        return cls(weight, weight.data_ptr(), weight._version)

    def holds_for(self, weight: torch.Tensor) -> bool:
        return weight is self.weight and weight.data_ptr() == self.address and weight._version == self.version
