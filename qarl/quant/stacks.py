"""Split the stacked parameters of a layer's experts into one matrix per expert.

transformers stacks the experts. Checkpoints, llm-compressor and vLLM's loader have three matrices per expert:

    mlp.experts.gate_up_proj [E, 2I, H]    mlp.experts.M.gate_proj.weight and .up_proj.weight [I, H]
    mlp.experts.down_proj    [E, H, I]     mlp.experts.M.down_proj.weight [H, I]

`quant.ignore`, the quantizer and a publish use the names of the matrices. A stack is recognised by its name and its
three dimensions, so tensors can be split without a model. The matrices are views, never copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

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
    experts, height = shape[0], shape[1] // len(STACKS[leaf])
    for expert in range(experts):
        for place, matrix in enumerate(STACKS[leaf]):
            yield Matrix(f"{owner}.{expert}.{matrix}", expert, slice(place * height, (place + 1) * height))


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
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if is_stack(name, shape):
            found |= {f"{m.name}.weight": (m.rows.stop - m.rows.start, shape[2]) for m in matrices(name, shape)}
        else:
            found[name] = shape
    return found


def stacked_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` that hold a layer's stacked experts, by name."""
    return {name: module for name, module in model.named_modules() if _holds_stacks(module)}


def _holds_stacks(module: nn.Module) -> bool:
    own = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
    return own.keys() >= STACKS.keys() and all(is_stack(name, own[name]) for name in STACKS)
