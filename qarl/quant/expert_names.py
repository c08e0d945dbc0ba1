"""Split the stacked parameters of a layer's experts into one matrix per expert.

transformers stacks the experts. Checkpoints, llm-compressor and vLLM's loader have three matrices per expert:

    mlp.experts.gate_up_proj [E, 2I, H]    mlp.experts.M.gate_proj.weight and .up_proj.weight [I, H]
    mlp.experts.down_proj    [E, H, I]     mlp.experts.M.down_proj.weight [H, I]

`quant.ignore`, the quantizer, checkpoints and exports use the names of the matrices. A stack is recognised by its name
and its three dimensions, so tensors can be split without a model. The matrices are views, never copies.

A publish sends whole stacks, because the work of a tensor does not depend on its size: a layer of 128 experts would
have 768 tensors in W4A16. On the wire a stack has the name of its parameter and of its tensor:

    mlp.experts.gate_up_proj.weight_packed [E, 2I, H/8]    mlp.experts.gate_up_proj.weight_scale [E, 2I, H/g]

It has no `weight_shape`, which is the same for every matrix and follows from the config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
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


_OF_EXPERT = re.compile(r"(.*[.]experts)[.](\d+)[.](gate_proj|up_proj|down_proj)[.](\w+)")


def is_of_expert(name: str) -> bool:
    """Return whether `name` is a checkpoint tensor of one expert's matrix."""
    return _OF_EXPERT.fullmatch(name) is not None


def stacked(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `tensors`, with the matrices of a layer's experts copied into stacks, named as on the wire.

    Other tensors are unchanged. So are the matrices of a layer whose experts are not complete or not alike."""
    for layer, group in groupby(tensors, key=lambda item: (_OF_EXPERT.fullmatch(item[0]) or [None, None])[1]):
        members = list(group)
        yield from members if layer is None else _stacks_of(layer, members) or members


def _stacks_of(layer: str, members: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]] | None:
    """Return the stacks of a layer's `members`, or None if they do not make whole stacks."""
    found: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name, tensor in members:
        _, expert, matrix, leaf = _OF_EXPERT.fullmatch(name).groups()  # type: ignore[union-attr]  # `stacked` has matched it
        if leaf != "weight_shape":
            found.setdefault((matrix, leaf), {})[int(expert)] = tensor
    count = max(len(one) for one in found.values())
    made = []
    for stack, matrices_of_expert in STACKS.items():
        for leaf in dict.fromkeys(leaf for _, leaf in found):
            parts = [found.get((matrix, leaf), {}) for matrix in matrices_of_expert]
            alike = {(tensor.dtype, tensor.shape) for part in parts for tensor in part.values()}
            if any(part.keys() != set(range(count)) for part in parts) or len(alike) != 1:
                return None
            rows = [torch.cat([part[expert] for part in parts]) for expert in range(count)]
            made.append((f"{layer}.{stack}.{leaf}", torch.stack(rows)))
    return made


def stacked_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` that hold a layer's stacked experts, by name."""
    return {name: module for name, module in model.named_modules() if _holds_stacks(module)}


def _holds_stacks(module: nn.Module) -> bool:
    own = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
    return own.keys() >= STACKS.keys() and all(is_stack(name, own[name]) for name in STACKS)
