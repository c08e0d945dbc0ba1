"""All experts of a layer: the low-bit layer, and the stacks and names of its matrices.

`QuantExperts` replaces transformers' experts, as `QuantLinear` replaces a linear, and keeps their two parameters:

    forward   y = sum over a token's experts of w * down(silu(gate(x)) * up(x))    a kernel of qarl.kernels.experts
    backward  straight-through, for x, both stacks and the router's weights w      see qarl.kernels.experts

A whole stack is quantized at once, and once per optimizer step (`qarl.quant.linear`). The bytes are the same as if each
matrix were quantized alone. With scheme bf16 nothing is quantized, and the forward is the engine's BF16 operator, which
`qarl.align.levels` uses for unquantized experts. transformers' registry of functions for experts is not used: it has
one function for all layers, while `quant.ignore` can name a single layer.

transformers stacks the experts. Checkpoints, llm-compressor and vLLM's loader have three matrices per expert:

    mlp.experts.gate_up_proj [E, 2I, H]    mlp.experts.M.gate_proj.weight and .up_proj.weight [I, H]
    mlp.experts.down_proj    [E, H, I]     mlp.experts.M.down_proj.weight [H, I]

`quant.ignore`, the quantizer's errors, checkpoints and exports use the names of the matrices. A stack is recognised by
its name and its three dimensions, so tensors can be split without a model. The matrices are views, never copies.

A publish sends whole stacks, because the work of a tensor does not depend on its size: a layer of 128 experts would
have 768 tensors in W4A16. On the wire a stack has the name of its parameter and of its tensor:

    mlp.experts.gate_up_proj.weight_packed [E, 2I, H/8]    mlp.experts.gate_up_proj.weight_scale [E, 2I, H/g]

It has no `weight_shape`, which is the same for every matrix and follows from the config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from qarl.errors import UserError
from qarl.kernels.base import ExpertsKernel, ExpertsShape, Tensors, from_layout
from qarl.kernels.experts import LowBitExperts, fused_experts
from qarl.kernels.registry import choose_experts_kernel
from qarl.quant.linear import QuantLayer
from qarl.quant.quantize import phase, quantize
from qarl.schemes import Scheme
from qarl.schemes.base import Operands
from qarl.schemes.kernel_choice import KernelChoice

STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Leaf name of each stack -> the matrices that it holds for each expert, in the order of their rows."""


class Matrix(NamedTuple):
    """One expert's matrix in a stack: `stack[expert, rows]`."""

    name: str
    expert: int
    rows: slice


def is_stack(name: str, shape: Iterable[int]) -> bool:
    """Return whether the state-dict tensor with this name and shape holds all experts of a layer."""
    return name.rpartition(".")[2] in STACKS and len(tuple(shape)) == 3


def matrices(name: str, shape: tuple[int, ...]) -> Iterator[Matrix]:
    """Yield the matrices of the stack `name` of `shape` [E, N, K], expert by expert."""
    owner, _, leaf = name.rpartition(".")
    experts = shape[0]
    height = shape[1] // len(STACKS[leaf])
    for expert in range(experts):
        for index, matrix in enumerate(STACKS[leaf]):
            yield Matrix(
                f"{owner}.{expert}.{matrix}", expert, slice(index * height, (index + 1) * height)
            )


def unstacked(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield checkpoint names and tensors. Stacks are split into their matrices; other tensors are unchanged."""
    for name, tensor in tensors:
        if not is_stack(name, tensor.shape):
            yield name, tensor
            continue
        for matrix in matrices(name, tuple(tensor.shape)):
            yield f"{matrix.name}.weight", tensor[matrix.expert, matrix.rows]


def unstacked_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that `unstacked` would yield."""
    split: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if is_stack(name, shape):
            split |= {
                f"{m.name}.weight": (m.rows.stop - m.rows.start, shape[2])
                for m in matrices(name, shape)
            }
        else:
            split[name] = shape
    return split


_OF_EXPERT = re.compile(r"(.*[.]experts)[.](\d+)[.](gate_proj|up_proj|down_proj)[.](\w+)")


def is_of_expert(name: str) -> bool:
    """Return whether `name` is a checkpoint tensor of one expert's matrix."""
    return _OF_EXPERT.fullmatch(name) is not None


def stacked(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `tensors`, with the matrices of a layer's experts copied into stacks, named as on the wire.

    Other tensors are unchanged. So are the matrices of a layer whose experts are not complete or not alike."""
    for layer, group in groupby(
        tensors, key=lambda item: (_OF_EXPERT.fullmatch(item[0]) or [None, None])[1]
    ):
        if layer is None:
            yield from group
        else:
            yield from _stacks_of(layer, list(group))


def _stacks_of(
    layer: str, members: list[tuple[str, torch.Tensor]]
) -> list[tuple[str, torch.Tensor]]:
    """Return the stacks of a layer's `members`, or `members` if they do not make whole stacks."""
    by_matrix: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name, tensor in members:
        _, expert, matrix, leaf = _OF_EXPERT.fullmatch(name).groups()  # type: ignore[union-attr]  # `stacked` has matched it
        if leaf != "weight_shape":
            by_matrix.setdefault((matrix, leaf), {})[int(expert)] = tensor
    count = max(len(by_expert) for by_expert in by_matrix.values())
    stacked = []
    for stack, matrices_of_expert in STACKS.items():
        for leaf in dict.fromkeys(leaf for _, leaf in by_matrix):
            parts = [by_matrix.get((matrix, leaf), {}) for matrix in matrices_of_expert]
            alike = {(tensor.dtype, tensor.shape) for part in parts for tensor in part.values()}
            if any(part.keys() != set(range(count)) for part in parts) or len(alike) != 1:
                return members
            rows = [torch.cat([part[expert] for part in parts]) for expert in range(count)]
            stacked.append((f"{layer}.{stack}.{leaf}", torch.stack(rows)))
    return stacked


def stacked_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` that hold a layer's stacked experts, by name."""
    return {name: module for name, module in model.named_modules() if _holds_stacks(module)}


def _holds_stacks(module: nn.Module) -> bool:
    own = {
        name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)
    }
    return own.keys() >= STACKS.keys() and all(is_stack(name, own[name]) for name in STACKS)


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
                yield (
                    f"{matrix.name}.weight_shape",
                    torch.tensor(size, dtype=torch.int64, device="cpu"),
                )


def quantize_stack(weight: torch.Tensor, scheme: Scheme, *, name: str) -> QuantizedStack:
    """Quantize the BF16 stack `weight` [E, N, K], with the same result as `quantize` on each of its matrices.

    `name`: the stack's state-dict name. Raises UserError if the shape does not fit the scheme, or if a weight is NaN or
    Inf.
    """
    experts, rows, columns = weight.shape
    tensors = {"weight": weight}
    if scheme.quantized:
        flat = quantize(weight.reshape(experts * rows, columns), scheme, name=name).tensors
        tensors = {
            leaf: t.view(experts, rows, t.shape[1])
            for leaf, t in flat.items()
            if leaf != "weight_shape"
        }
    return QuantizedStack(name, scheme, (experts, rows, columns), tensors)


class ExpertsInOneCopy(NamedTuple):
    """The stacks of a layer as they are stored, on the wire or in the kernel's layout, without a second copy.

    The other attributes are made at each access, because one layer's copy at a time is enough. FSDP2 fills the two
    mappings for the forward and again for the backward.
    """

    kernel: type[ExpertsKernel]
    stored_gate_up: Tensors
    stored_down: Tensors
    operands: Operands

    @property
    def prepared(self) -> Any:
        with phase("prepare"):
            return self.kernel.prepare_gathered(
                self.stored_gate_up, self.stored_down, self.operands
            )

    @property
    def gate_up(self) -> Tensors:
        with phase("prepare"):
            return from_layout(self.stored_gate_up, self.kernel.layout)

    @property
    def down(self) -> Tensors:
        with phase("prepare"):
            return from_layout(self.stored_down, self.kernel.layout)


class QuantExperts(QuantLayer):
    """Experts with `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I], both BF16. The activation function is SiLU."""

    WEIGHTS = tuple(STACKS)
    DERIVED = ("_quantized", "_low_bit")
    multiplies = "kernels of experts"
    stores_layout = True
    _quantized: dict[str, QuantizedStack] | None
    _low_bit: LowBitExperts | None

    def __init__(
        self,
        experts: nn.Module,
        scheme: Scheme,
        *,
        qualified_name: str,
        kernel: str | None = None,
        kernels: KernelChoice = KernelChoice.ENGINE,
        device: torch.device | None = None,
    ) -> None:
        """Take over the parameters of transformers' `experts` without a copy. Other arguments are as in `QuantLinear`.

        Raise UserError if `check_experts` refuses the experts, or if no kernel supports them.
        """
        super().__init__()
        check_experts(experts, qualified_name)
        stacks: Any = experts
        self.gate_up_proj: nn.Parameter = stacks.gate_up_proj
        self.down_proj: nn.Parameter = stacks.down_proj
        count, hidden, intermediate = self.down_proj.shape
        choice = choose_experts_kernel(
            scheme,
            device or self.down_proj.device,
            ExpertsShape(count, stacks.config.num_experts_per_tok, hidden, intermediate),
            force=kernel,
            kernels=kernels,
        )
        self._choose(scheme, qualified_name, choice)

    def quantized(self) -> dict[str, QuantizedStack]:
        """Return both quantized stacks of the current weights by the names of their parameters."""
        if self.stored is not None:
            layout = self.kernel.layout
            return {
                leaf: self._restored(leaf, from_layout(tensors, layout))
                for leaf, tensors in self.stored.items()
            }
        if self._quantized is None or self.stale:
            self.invalidate()
            with torch.no_grad():
                quantized = {
                    leaf: quantize_stack(
                        getattr(self, leaf).detach(),
                        self.scheme,
                        name=f"{self.qualified_name}.{leaf}",
                    )
                    for leaf in STACKS
                }
                with phase("prepare"):
                    gate_up, down = (stack.tensors for stack in quantized.values())
                    self._low_bit = LowBitExperts.of(
                        self.kernel, gate_up, down, self.scheme.operands
                    )
            self._quantized = quantized
            self._mark()
        return self._quantized

    def _restored(self, leaf: str, tensors: Tensors) -> QuantizedStack:
        experts, rows, columns = getattr(self, leaf).shape
        return QuantizedStack(
            self.published_as(leaf), self.scheme, (experts, rows, columns), dict(tensors)
        )

    def by_weight(self) -> dict[str, QuantizedStack]:
        return self.quantized()

    def in_layout(self) -> dict[str, Tensors]:
        assert self._low_bit is not None
        return dict(zip(STACKS, self.kernel.in_layout(self._low_bit.prepared), strict=True))

    def published_as(self, name: str) -> str:
        return f"{self.qualified_name}.{name}"

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return BF16 [T, H] from `hidden_states` BF16 [T, H], each token's experts [T, k] and their weights [T, k]."""
        self.check_input(hidden_states.dtype)
        experts = self.low_bit()
        y = fused_experts(
            hidden_states, top_k_weights, top_k_index, self.gate_up_proj, self.down_proj, experts
        )
        if y.requires_grad:
            generation = self.generation
            y.register_hook(lambda _: self.check_unchanged(generation))
        return y

    def low_bit(self) -> Any:
        """Return the weights for a forward and its backward."""
        if self.stored is not None:
            gate_up, down = self.stored.values()
            return ExpertsInOneCopy(self.kernel, gate_up, down, self.scheme.operands)
        self.quantized()
        assert self._low_bit is not None
        return self._low_bit


def check_experts(experts: nn.Module, name: str) -> None:
    """Raise UserError unless transformers' experts compute down(silu(gate(x)) * up(x)) without biases.

    Gate and up must be in one stack.
    """
    flags = {"has_gate": True, "is_concatenated": True, "has_bias": False, "is_transposed": False}
    wrong = [
        f"{flag}={not expected}"
        for flag, expected in flags.items()
        if getattr(experts, flag, expected) is not expected
    ]
    activation: Any = getattr(experts, "act_fn", None)
    probe = torch.linspace(-4.0, 4.0, 33, device="cpu")
    computes = getattr(
        activation, "forward", activation
    )  # without hooks, such as those of qarl.align.levels
    if activation is None or not torch.equal(computes(probe), torch.nn.functional.silu(probe)):
        wrong.append(f"activation {type(activation).__name__}")
    if wrong:
        raise UserError(
            f"{name}: these experts cannot be quantized",
            where=f"{type(experts).__name__}: {', '.join(wrong)}",
            why="the kernels compute down(silu(gate(x)) * up(x)) with weights [experts, out, in] and without biases",
            fix="train a model of a different family",
        )
