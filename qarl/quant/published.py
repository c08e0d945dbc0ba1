"""The tensors of a checkpoint that somebody else has quantized, under the names and in the dtypes of a publish.

Codes stay as they are: nothing is dequantized and rounded again. Scales are cast to the dtype in which vLLM keeps them:
FP32 for channels, which loses nothing, and BF16 for groups, which vLLM rounds in the same way. Linears that a file has
fused, such as qkv_proj, are cut into the model's own along their rows, which no scale crosses. Unquantized tensors are
rounded to BF16, as a BF16 model's are when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from qarl.errors import UserError
from qarl.quant.convert import FUSED_LAYERS, linear_shapes, tied_names
from qarl.quant.wire_specs import wire_specs
from qarl.schemes import Scheme

SCALE = ".weight_scale"
REFUSED = {
    "weight_zero_point": "zero points are not in QaRL's formats",
    "weight_g_idx": "an order of columns (actorder=group) is not in QaRL's formats",
    "input_scale": "scales of activations are computed for each token",
    "output_scale": "outputs are not quantized",
    "weight_scale_inv": "its scales are of blocks",
    "k_scale": "the KV cache is not quantized",
    "v_scale": "the KV cache is not quantized",
}
"""Endings of tensors that other schemes have, and why they are refused."""


class Part(NamedTuple):
    """Rows of a stored linear that are one of the model's linears, `name`."""

    name: str
    rows: slice


class PublishedBase:
    """A quantized checkpoint, read from the headers of its `files`, for `model` (on any device).

    scheme    that of the quantized linears
    linears   their names
    folder    that of the files, which for a name on the Hub is its snapshot
    """

    def __init__(self, files: Sequence[Path], model: nn.Module, scheme: Scheme) -> None:
        """Raise UserError if tensors are missing, unknown, or have other shapes than `scheme` gives them."""
        self._files = list(files)
        self.folder = self._files[0].parent
        self.scheme = scheme
        self._shapes = linear_shapes(model)
        second_names = tied_names(model)
        self._plain = {
            name: tuple(tensor.shape)
            for name, tensor in model.state_dict().items()
            if name not in second_names
        }
        self._tied = second_names
        self._stored = dict(_headers(self._files))
        self._parts: dict[str, list[Part]] = {}
        for name in self._stored:
            if name.endswith(SCALE):
                owner = name.removesuffix(SCALE)
                self._parts[owner] = self._cut(owner)
        self.linears = frozenset(part.name for parts in self._parts.values() for part in parts)
        self._check()

    def _cut(self, owner: str) -> list[Part]:
        """Return the model's linears that the stored linear `owner` has."""
        parent, dot, leaf = owner.rpartition(".")
        names = [f"{parent}{dot}{part}" for part in FUSED_LAYERS.get(leaf, (leaf,))]
        if any(name not in self._shapes for name in names):
            raise self._misfit([f"{owner}{SCALE} belongs to no linear of the model"])
        parts, start = [], 0
        for name in names:
            stop = start + self._shapes[name][0]
            parts.append(Part(name, slice(start, stop)))
            start = stop
        return parts

    def _check(self) -> None:
        problems = []
        arrived: set[str] = set()
        for name, shape in self._stored.items():
            owner, _, leaf = name.rpartition(".")
            if leaf in REFUSED:
                problems.append(f"{name}: {REFUSED[leaf]}")
            elif owner in self._parts and leaf != "bias":
                problems += self._check_wire(owner, leaf, shape)
            elif name in self._tied:
                continue
            elif self._plain.get(name) != shape:
                known = self._plain.get(name)
                problems.append(
                    f"{name} is {list(shape)}, and should be {list(known)}"
                    if known
                    else f"{name} is no tensor of the model"
                )
            else:
                arrived.add(name)
        needed = {name for name in self._plain if name.rpartition(".")[0] not in self.linears}
        needed |= {f"{name}.bias" for name in self.linears if f"{name}.bias" in self._plain}
        problems += [f"{name} is missing" for name in sorted(needed - arrived)]
        for owner in self._parts:
            leaves = wire_specs(self.scheme, 8, self._columns(owner)).keys()
            problems += [
                f"{owner}.{leaf} is missing"
                for leaf in leaves
                if f"{owner}.{leaf}" not in self._stored
            ]
        if problems:
            raise self._misfit(problems)

    def _columns(self, owner: str) -> int:
        return self._shapes[self._parts[owner][0].name][1]

    def _check_wire(self, owner: str, leaf: str, shape: tuple[int, ...]) -> Iterator[str]:
        rows = self._parts[owner][-1].rows.stop
        specs = wire_specs(self.scheme, rows, self._columns(owner))
        name = f"{owner}.{leaf}"
        if leaf not in specs:
            yield f"{name} is no tensor of {self.scheme.name}"
            return
        expected = specs[leaf][1]
        if shape != expected and not (leaf == "weight_scale" and (*shape, 1) == expected):
            yield f"{name} is {list(shape)}, and should be {list(expected)}"

    def _misfit(self, problems: Sequence[str]) -> UserError:
        more = f"; and {len(problems) - 6} more" if problems[6:] else ""
        return UserError(
            f"the quantized checkpoint does not fit: {len(problems)} of its tensors",
            where=f"model.path: {self.folder}: {'; '.join(problems[:6])}{more}",
            why=f"its config.json says {self.scheme.name}"
            + (f" in groups of {self.scheme.group_size}" if self.scheme.group_size else ""),
            fix="give all files of one checkpoint, as compressed-tensors or llm-compressor writes them",
        )

    def shape(self, name: str) -> tuple[int, int]:
        """Return [N, K] of a linear."""
        return self._shapes[name]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the model, quantized ones as in a publish, one linear at a time."""
        for file in self._files:
            with safe_open(file, framework="pt") as opened:
                names = opened.keys()  # safe_open is no mapping
                for name in names:
                    yield from self._published(name, opened.get_tensor(name))

    def _published(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        owner, _, leaf = name.rpartition(".")
        parts = self._parts.get(owner)
        if parts is None or leaf == "bias":
            if name not in self._tied:
                yield name, tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            return
        for part in parts:
            dtype, shape = wire_specs(self.scheme, *self._shapes[part.name])[leaf]
            if leaf == "weight_shape":
                cut = torch.tensor(self._shapes[part.name], dtype=torch.int64)
            elif leaf == "weight_scale":
                cut = tensor[part.rows].to(dtype).reshape(shape)
            elif tensor.dtype != dtype:
                raise self._misfit([f"{name} is {tensor.dtype}, and should be {dtype}"])
            else:
                cut = tensor[part.rows]
            yield f"{part.name}.{leaf}", cut.contiguous()


def _headers(files: Iterable[Path]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # safe_open is no mapping
            for name in names:
                yield name, tuple(file.get_slice(name).get_shape())


def split_wire(
    tensors: Iterable[tuple[str, Tensor]], linears: frozenset[str]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return the unquantized `tensors` by name, and those of each of `linears`, by its name and by their last parts."""
    plain: dict[str, Tensor] = {}
    wire: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        owner, _, leaf = name.rpartition(".")
        if owner in linears and leaf != "bias":
            wire.setdefault(owner, {})[leaf] = tensor
        else:
            plain[name] = tensor
    return plain, wire
