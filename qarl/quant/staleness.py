"""Detect whether a weight has changed since it was quantized, by autograd's version counter.

In-place updates advance the counter of a tensor. Some optimizers do not: fused ones (torch 2.13: AdamW with
fused=True), and on DTensors also foreach ones, torch's default on GPUs. So `watch_optimizers` advances the counters of
an optimizer's parameters after each of its steps.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


@cache
def watch_optimizers() -> None:
    """Advance the version counters of all parameters that any torch optimizer steps. A second call changes nothing."""

    def advance(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            torch.autograd.graph.increment_version(group["params"])

    register_optimizer_step_post_hook(advance)


class Mark(NamedTuple):
    """The state of a weight: the parameter, its address, and autograd's version counter.

    A mark keeps its parameter alive. Otherwise a new parameter could get the same address and the same version.
    """

    weight: torch.Tensor
    address: int
    version: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> Mark:
        return cls(weight, weight.data_ptr(), weight._version)

    def holds_for(self, weight: torch.Tensor) -> bool:
        return weight is self.weight and weight.data_ptr() == self.address and weight._version == self.version
