"""QuantExperts: all experts of a layer. The forward multiplies by the engine's low-bit tensors.

    forward   y = sum over a token's experts of w * down(silu(gate(x)) * up(x))    a kernel of qarl.kernels.experts
    backward  straight-through, for x, both stacks and the router's weights w      see qarl.kernels.experts.autograd

The module replaces transformers' experts, as `QuantLinear` replaces a linear. It keeps the two stacked parameters and
their names. transformers' registry of functions for experts is not used, because it has one function for all layers,
while `quant.ignore` can name a single layer.

A whole stack is quantized at once, and once per optimizer step. The bytes are the same as if each gate_proj, up_proj
and down_proj were quantized alone. After writing through `.data`, call `invalidate_quantized`.

With scheme bf16 nothing is quantized, and the forward is the engine's BF16 operator. `qarl.align.model` uses this for
unquantized experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qarl.errors import UserError
from qarl.kernels.experts.autograd import (
    ExpertsKernel,
    ExpertsWeights,
    LowBitExperts,
    choose_experts_kernel,
    fused_experts,
)
from qarl.kernels.experts.grouped import ExpertsShape
from qarl.quant.expert_names import STACKS, matrices
from qarl.quant.quantize import quantize
from qarl.quant.scheme import Scheme
from qarl.quant.staleness import Mark
from qarl.quant.timing import phase


@dataclass(frozen=True, eq=False)
class QuantizedStack:
    """The stack `name` of `shape` [E, N, K], quantized with `scheme`.

    `tensors`: the wire tensors of all matrices, stacked [E, N, ...], with compressed-tensors names. `weight_shape` is
    left out because it is the same for every matrix.
    """

    name: str
    scheme: Scheme
    shape: tuple[int, int, int]
    tensors: dict[str, torch.Tensor]

    def stacked(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and the tensors of a publish."""
        for leaf, tensor in self.tensors.items():
            yield f"{self.name}.{leaf}", tensor

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield checkpoint names and wire tensors of each expert's matrices, as views of the stacked tensors."""
        for matrix in matrices(self.name, self.shape):
            for leaf, tensor in self.tensors.items():
                yield f"{matrix.name}.{leaf}", tensor[matrix.expert, matrix.rows]
            if "weight_packed" in self.tensors:
                size = [matrix.rows.stop - matrix.rows.start, self.shape[2]]
                yield f"{matrix.name}.weight_shape", torch.tensor(size, dtype=torch.int64, device="cpu")


def quantize_stack(weight: torch.Tensor, scheme: Scheme, *, name: str) -> QuantizedStack:
    """Quantize the BF16 stack `weight` [E, N, K], with the same result as `quantize` on each of its matrices.

    `name`: the stack's state-dict name. Raises UserError if the shape does not fit the scheme, or if a weight is NaN or
    Inf.
    """
    experts, rows, columns = weight.shape
    tensors = {"weight": weight}
    if scheme.quantized:
        flat = quantize(weight.reshape(experts * rows, columns), scheme, name=name).tensors
        tensors = {leaf: t.view(experts, rows, t.shape[1]) for leaf, t in flat.items() if leaf != "weight_shape"}
    return QuantizedStack(name, scheme, (experts, rows, columns), tensors)


class QuantExperts(nn.Module):
    """Experts with `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I], both BF16. The activation function is SiLU."""

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
        self.scheme, self.qualified_name = scheme, qualified_name
        count, hidden, intermediate = self.down_proj.shape
        self.choice = choose_experts_kernel(
            scheme.name,
            device or self.down_proj.device,
            ExpertsShape(count, given.config.num_experts_per_tok, hidden, intermediate),
            group_size=scheme.group_size,
            force=kernel,
        )
        self._generation = 0
        self._made_from: tuple[Mark, ...] = ()
        self._quantized: dict[str, QuantizedStack] = {}
        self._low_bit: LowBitExperts | None = None

    @property
    def kernel(self) -> type[ExpertsKernel]:
        return self.choice.kernel

    @property
    def generation(self) -> int:
        """How many times the weights were quantized."""
        return self._generation

    def quantized(self) -> dict[str, QuantizedStack]:
        """Return both quantized stacks of the current weights by the names of their parameters."""
        if self.stale:
            self.invalidate()
            weights = [getattr(self, leaf) for leaf in STACKS]
            with torch.no_grad():
                for leaf, weight in zip(STACKS, weights, strict=True):
                    name = f"{self.qualified_name}.{leaf}"
                    self._quantized[leaf] = quantize_stack(weight.detach(), self.scheme, name=name)
                gate_up, down = (self._quantized[leaf].tensors for leaf in STACKS)
                with phase("prepare"):
                    self._low_bit = LowBitExperts.of(self.kernel, gate_up, down)
            self._generation += 1
            self._made_from = tuple(Mark.of(weight) for weight in weights)
        return self._quantized

    def invalidate(self) -> None:
        """Drop the quantized tensors. The next use makes them again."""
        self._made_from, self._quantized, self._low_bit = (), {}, None

    @property
    def stale(self) -> bool:
        """Whether a weight was changed or replaced since it was quantized."""
        weights = (self.gate_up_proj, self.down_proj)
        return not self._made_from or not all(map(Mark.holds_for, self._made_from, weights))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the quantized tensors out of copies and pickles, because a kernel may own their memory."""
        return {**self.__dict__, "_made_from": (), "_quantized": {}, "_low_bit": None}

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return BF16 [T, H] from `hidden_states` BF16 [T, H], each token's experts [T, k] and their weights [T, k]."""
        if hidden_states.dtype != torch.bfloat16:
            raise UserError(
                f"{self.qualified_name} got {hidden_states.dtype} activations",
                why="the kernels of experts multiply BF16 activations, as the rollout engine does",
                fix="run the model in bfloat16, without autocast to a different dtype",
            )
        experts = self.low_bit()
        y = fused_experts(hidden_states, top_k_weights, top_k_index, self.gate_up_proj, self.down_proj, experts)
        if y.requires_grad:
            generation = self.generation
            y.register_hook(lambda _: self._check_unchanged(generation))
        return y

    def low_bit(self) -> ExpertsWeights:
        """Return the weights for a forward and its backward."""
        self.quantized()
        assert self._low_bit is not None
        return self._low_bit

    def _check_unchanged(self, generation: int) -> None:
        if self.generation != generation or self.stale:
            raise RuntimeError(f"{self.qualified_name} changed between its forward and its backward")

    def extra_repr(self) -> str:
        count, hidden, intermediate = self.down_proj.shape
        return (
            f"experts={count}, hidden={hidden}, intermediate={intermediate}, scheme={self.scheme.name}, "
            f"kernel={self.kernel.name}"
        )


def check_experts(experts: nn.Module, name: str) -> None:
    """Raise UserError unless transformers' experts compute down(silu(gate(x)) * up(x)) without biases.

    Gate and up must be in one stack.
    """
    flags = {"has_gate": True, "is_concatenated": True, "has_bias": False, "is_transposed": False}
    wrong = [f"{flag}={not wanted}" for flag, wanted in flags.items() if getattr(experts, flag, wanted) is not wanted]
    activation: Any = getattr(experts, "act_fn", None)
    probe = torch.linspace(-4.0, 4.0, 33, device="cpu")
    computes = getattr(activation, "forward", activation)  # without hooks, such as those of qarl.align.noise
    if activation is None or not torch.equal(computes(probe), torch.nn.functional.silu(probe)):
        wrong.append(f"activation {type(activation).__name__}")
    if wrong:
        raise UserError(
            f"{name}: these experts cannot be quantized",
            where=f"{type(experts).__name__}: {', '.join(wrong)}",
            why="the kernels compute down(silu(gate(x)) * up(x)) with weights [experts, out, in] and without biases",
            fix="train a model of a different family",
        )
