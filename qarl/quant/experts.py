"""QuantExperts: all experts of a layer. The forward multiplies by the engine's low-bit tensors.

    forward   y = sum over a token's experts of w * down(silu(gate(x)) * up(x))    a kernel of qarl.kernels.experts
    backward  straight-through, for x, both stacks and the router's weights w      see qarl.kernels.experts.autograd

The module replaces transformers' experts, as `QuantLinear` replaces a linear. It keeps the two stacked parameters and
their names. transformers' registry of functions for experts is not used, because it has one function for all layers,
while `quant.ignore` can name a single layer.

A whole stack is quantized at once, and once per optimizer step (`qarl.quant.linear`). The bytes are the same as if each
gate_proj, up_proj and down_proj were quantized alone.

With scheme bf16 nothing is quantized, and the forward is the engine's BF16 operator. `qarl.align.model` uses this for
unquantized experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qarl.errors import UserError
from qarl.kernels.experts.autograd import (
    LowBitExperts,
    choose_experts_kernel,
    fused_experts,
)
from qarl.kernels.experts.grouped import ExpertsShape
from qarl.quant.expert_names import STACKS
from qarl.quant.linear import QuantLayer
from qarl.quant.quantize import QuantizedStack, phase, quantize_stack
from qarl.quant.scheme import Scheme


class QuantExperts(QuantLayer):
    """Experts with `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I], both BF16. The activation function is SiLU."""

    WEIGHTS = tuple(STACKS)
    MADE = ("_quantized", "_low_bit")
    multiplies = "kernels of experts"
    _quantized: dict[str, QuantizedStack] | None
    _low_bit: LowBitExperts | None

    def __init__(
        self,
        experts: nn.Module,
        scheme: Scheme,
        *,
        qualified_name: str,
        kernel: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Take over the parameters of transformers' `experts` without a copy. Other arguments are as in `QuantLinear`.

        Raise UserError if `check_experts` refuses the experts, or if no kernel supports them.
        """
        super().__init__()
        check_experts(experts, qualified_name)
        given: Any = experts
        self.gate_up_proj: nn.Parameter = given.gate_up_proj
        self.down_proj: nn.Parameter = given.down_proj
        count, hidden, intermediate = self.down_proj.shape
        choice = choose_experts_kernel(
            scheme.name,
            device or self.down_proj.device,
            ExpertsShape(count, given.config.num_experts_per_tok, hidden, intermediate),
            group_size=scheme.group_size,
            force=kernel,
        )
        self._choose(scheme, qualified_name, choice)

    def quantized(self) -> dict[str, QuantizedStack]:
        """Return both quantized stacks of the current weights by the names of their parameters."""
        if self._quantized is None or self.stale:
            self.invalidate()
            with torch.no_grad():
                made = {
                    leaf: quantize_stack(
                        getattr(self, leaf).detach(), self.scheme, name=f"{self.qualified_name}.{leaf}"
                    )
                    for leaf in STACKS
                }
                with phase("prepare"):
                    self._low_bit = LowBitExperts.of(self.kernel, *(stack.tensors for stack in made.values()))
            self._quantized = made
            self._mark()
        return self._quantized

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return BF16 [T, H] from `hidden_states` BF16 [T, H], each token's experts [T, k] and their weights [T, k]."""
        self.check_input(hidden_states.dtype)
        experts = self.low_bit()
        y = fused_experts(hidden_states, top_k_weights, top_k_index, self.gate_up_proj, self.down_proj, experts)
        if y.requires_grad:
            generation = self.generation
            y.register_hook(lambda _: self.check_unchanged(generation))
        return y

    def low_bit(self) -> Any:
        """Return the weights for a forward and its backward."""
        self.quantized()
        assert self._low_bit is not None
        return self._low_bit


def check_experts(experts: nn.Module, name: str) -> None:
    """Raise UserError unless transformers' experts compute down(silu(gate(x)) * up(x)) without biases.

    Gate and up must be in one stack.
    """
    flags = {"has_gate": True, "is_concatenated": True, "has_bias": False, "is_transposed": False}
    wrong = [f"{flag}={not wanted}" for flag, wanted in flags.items() if getattr(experts, flag, wanted) is not wanted]
    activation: Any = getattr(experts, "act_fn", None)
    probe = torch.linspace(-4.0, 4.0, 33, device="cpu")
    computes = getattr(activation, "forward", activation)  # without hooks, such as those of qarl.align.model
    if activation is None or not torch.equal(computes(probe), torch.nn.functional.silu(probe)):
        wrong.append(f"activation {type(activation).__name__}")
    if wrong:
        raise UserError(
            f"{name}: these experts cannot be quantized",
            where=f"{type(experts).__name__}: {', '.join(wrong)}",
            why="the kernels compute down(silu(gate(x)) * up(x)) with weights [experts, out, in] and without biases",
            fix="train a model of a different family",
        )
