"""Open a GGUF file, and refuse one that would become a different model than the one that it was made of.

The package gguf reads the format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). transformers converts the
weights, but it ignores what it does not know: a rotary embedding that is scaled would be converted to one that is not.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from qarl.data.git_lfs import refuse_pointers
from qarl.errors import UserError

MAGIC = b"GGUF"
EXACT_TYPES = ("F64", "F32", "F16", "BF16")
"""Types of a GGUF file that store numbers and not multiples of a scale. Names: gguf.GGMLQuantizationType."""
FACTORS = ("rope.scaling.factor", "rope.scale_linear")
"""Keys of the factor by which positions are divided, after the name of the architecture. Old files have the second
one."""


class StoredType(NamedTuple):
    """How much of a file is stored in one type. `name`: as gguf spells it. `numbers`: the elements of all tensors."""

    name: str
    tensors: int
    numbers: int

    @property
    def rounded(self) -> bool:
        """Whether the numbers were rounded to multiples of a scale."""
        return self.name not in EXACT_TYPES

    @property
    def finer_than_bf16(self) -> bool:
        """Whether the numbers have more binary digits than BF16, to which the conversion rounds them."""
        return self.name in EXACT_TYPES and self.name != "BF16"


class GGUFFile:
    """The metadata and the list of tensors of a GGUF file that was opened without an error."""

    def __init__(self, path: Path) -> None:
        """Read the header of a file that passed `check_start`, and map its tensors.

        Raise UserError if the file is not whole, or its conversion would be a different model."""
        self.path = path
        from gguf import GGUFReader

        try:
            self._reader = GGUFReader(path)
        except Exception as error:  # the reader's type depends on where the bytes end
            why = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{path} cannot be read as a GGUF file",
                why=f"it is cut short or damaged ({' '.join(why.split())[:200]})",
                fix="download the file again, and compare its size",
            ) from error
        self._check_whole()
        self._check_rotary()

    def get(self, key: str) -> Any:
        """Return the value of a key of the metadata, or None."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    @property
    def architecture(self) -> str:
        """The family, as llama.cpp spells it."""
        return str(self.get("general.architecture"))

    @property
    def numbers(self) -> int:
        """The elements of all tensors."""
        return sum(stored.numbers for stored in self.stored_types())

    def stored_types(self) -> list[StoredType]:
        """Return the types of the file, the one with most numbers first."""
        tensors: Counter[str] = Counter()
        numbers: Counter[str] = Counter()
        for tensor in self._reader.tensors:
            name = tensor.tensor_type.name
            tensors[name] += 1
            numbers[name] += int(tensor.n_elements)
        return [StoredType(name, tensors[name], count) for name, count in numbers.most_common()]

    def _check_whole(self) -> None:
        shards = self.get("split.count") or 0
        if shards > 1:
            raise UserError(
                f"{self.path} is one of {shards} parts of a model",
                why="only a model in one file can be converted",
                fix="join the parts with llama.cpp's `llama-gguf-split --merge`, and convert the result",
            )
        if not self._reader.tensors or self.get("general.architecture") is None:
            raise UserError(
                f"{self.path} holds no model",
                why="it has no tensors, or its metadata name no architecture; a file of a vocabulary is such a file",
                fix="give the GGUF file of a whole model",
            )

    def _check_rotary(self) -> None:
        """Raise UserError if the file scales its rotary embedding, which transformers' conversion would leave out."""
        ignored = self._rotary_scaling()
        if not ignored:
            return
        raise UserError(
            f"{self.path} has a scaled rotary embedding, and its conversion would have none",
            why=f"transformers' conversion ignores {', '.join(ignored)}",
            fix="use the original model's folder, from which the GGUF file was made",
        )

    def _rotary_scaling(self) -> list[str]:
        """Return the tensors and keys that scale the rotary embedding. Without a type, a factor is a linear scaling, as
        llama.cpp reads it."""
        names = {tensor.name for tensor in self._reader.tensors}
        found = sorted(name for name in names if name.startswith("rope_f"))
        kind = self.get(f"{self.architecture}.rope.scaling.type")
        if kind is not None:
            return found if kind == "none" else [*found, f"rope.scaling.type={kind}"]
        for key in FACTORS:
            factor = self.get(f"{self.architecture}.{key}") or 1.0
            if factor != 1.0:
                found.append(f"{key}={factor:g}")
        return found


def check_start(path: Path) -> None:
    """Raise UserError unless `path` is a file that starts as a GGUF file does."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}", where="file", fix="give a GGUF file")
    refuse_pointers([path], where="file")
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
    except OSError as error:
        raise UserError(f"{path} cannot be read", where="file", why=str(error)) from error
    if start != MAGIC:
        why = f"a GGUF file starts with {MAGIC!r}, and this one with {start!r}"
        raise UserError(f"{path} is not a GGUF file", why=why, fix="give a GGUF file")
