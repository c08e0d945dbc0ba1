"""What both low-bit layers share: the choice of a kernel, and quantized tensors that follow the weights.

Autograd's version counter tells whether a weight has changed since it was quantized. In-place updates advance the
counter of a tensor. Some optimizers do not: fused ones (torch 2.13: AdamW with fused=True), and on DTensors also
foreach ones, torch's default on GPUs. So `watch_optimizers` advances the counters of an optimizer's parameters after
each of its steps.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from qarl.errors import UserError
from qarl.kernels.registry import Choice
from qarl.quant.scheme import Scheme


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


class QuantLayer(nn.Module):
    """Base of `QuantLinear` and `QuantExperts`.

    The weights are quantized when a storage or a version counter has changed, so once per optimizer step. After writing
    through `.data`, which does not advance the counter, call `invalidate_quantized`.
    """

    WEIGHTS: ClassVar[tuple[str, ...]]
    """Names of the parameters that are quantized."""
    MADE: ClassVar[tuple[str, ...]]
    """Names of the attributes that are made from the weights. They are None until the first use."""
    multiplies: ClassVar[str]
    """What multiplies, in an error."""
    scheme: Scheme
    qualified_name: str
    choice: Choice[Any]
    _marks: tuple[Mark, ...]

    def _choose(self, scheme: Scheme, qualified_name: str, choice: Choice[Any]) -> None:
        self.scheme, self.qualified_name, self.choice = scheme, qualified_name, choice
        self._generation = 0
        self._drop()

    @property
    def kernel(self) -> Any:
        return self.choice.kernel

    @property
    def generation(self) -> int:
        """How many times the weights were quantized."""
        return self._generation

    @property
    def stale(self) -> bool:
        """Whether a weight was changed or replaced since it was quantized."""
        marked = zip(self._marks, self.WEIGHTS, strict=False)
        return not self._marks or not all(mark.holds_for(getattr(self, name)) for mark, name in marked)

    def _mark(self) -> None:
        """Note that the weights have just been quantized."""
        self._generation += 1
        self._marks = tuple(Mark.of(getattr(self, name)) for name in self.WEIGHTS)

    def invalidate(self) -> None:
        """Drop the quantized tensors. The next use makes them again."""
        self._drop()

    def _drop(self) -> None:
        self._marks = ()
        for name in self.MADE:
            setattr(self, name, None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the quantized tensors out of copies and pickles, because a kernel may own their memory."""
        return {**self.__dict__, "_marks": (), **dict.fromkeys(self.MADE)}

    def check_input(self, dtype: torch.dtype) -> None:
        if dtype != torch.bfloat16:
            raise UserError(
                f"{self.qualified_name} got {dtype} activations",
                why=f"the {self.multiplies} multiply BF16 activations, as the rollout engine does",
                fix="run the model in bfloat16, without autocast to a different dtype",
            )

    def check_unchanged(self, generation: int) -> None:
        """Raise RuntimeError unless the weights are those of the forward, which had this `generation`."""
        if self.generation != generation or self.stale:
            raise RuntimeError(f"{self.qualified_name} changed between its forward and its backward")
