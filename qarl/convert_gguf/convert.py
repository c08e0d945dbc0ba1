"""Convert a GGUF file of a family that QaRL trains to a model folder in Hugging Face's format, with BF16 weights.

transformers dequantizes the tensors, permutes the rows of Llama's queries and keys back, and maps the names. What it
leaves out or fills with random numbers is refused here. The folder appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from qarl.checkpoint.storage import check_place, whole_folder
from qarl.console import stage
from qarl.convert_gguf.gguf_file import GGUFFile, check_start
from qarl.convert_gguf.tokenizer import convert_tokenizer
from qarl.errors import UserError
from qarl.families import check_family

RECORD = "gguf_conversion.json"
"""In the folder: of which file it was made, and what differs from the original model."""
BYTES_OF_OTHER_FILES = 50_000_000
"""Room for tokenizer and config; the largest vocabularies have some 30 MB."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ConversionRequest:
    """The arguments of the command line. `file`: the GGUF file. `folder`: the folder to write."""

    file: Path
    folder: Path


def check(request: ConversionRequest) -> None:
    """Raise UserError if the file or the folder cannot be used, as far as can be seen without the package gguf."""
    check_start(request.file)
    check_folder(request.folder)


def convert(request: ConversionRequest) -> str:
    """Write the folder. Return a report for people.

    Raise UserError, before anything is written, if the file or the folder cannot be used, and StorageError if the disk
    refuses to write."""
    check(request)
    file = GGUFFile(request.file)
    config = read_config(file)
    needed = 2 * file.numbers + BYTES_OF_OTHER_FILES
    with whole_folder(request.folder, needed_bytes=needed) as new:
        with stage(f"converting {request.file.name}", imports=True), _quiet():
            model = load_weights(file)
            tokenizer, ends, changes = convert_tokenizer(file, config.max_position_embeddings)
            set_ends(model, tokenizer, ends)
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
        lines = [*about_weights(file), *changes, *about_ends(tokenizer, ends)]
        write_record(new, request.file, lines)
    head = f"{request.folder}: {type(model).__name__}, {model.num_parameters():,} parameters, BF16"
    return "\n".join([head, *(f"  - {line}" for line in lines)])


def check_folder(folder: Path) -> None:
    """Raise UserError if `folder` is a file, has files, or cannot be written."""
    check_place(folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    raise UserError(
        f"{folder} exists and is no empty folder",
        where="folder",
        why="a conversion replaces nothing",
        fix="choose a different folder, or remove this one yourself",
    )


def read_config(file: GGUFFile) -> Any:
    """Return the model's config of Hugging Face. Raise UserError if QaRL or transformers does not know its family."""
    from transformers import AutoConfig

    where = f"{file.path}: general.architecture={file.architecture}"
    try:
        config = AutoConfig.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    except ValueError as error:
        raise UserError(
            f"transformers cannot convert a GGUF file of the family {file.architecture}",
            where=where,
            why=" ".join(str(error).split())[:300],
            fix="use the original model's folder, from which the GGUF file was made",
        ) from error
    try:
        check_family(config)
    except UserError as error:
        raise UserError(error.what, where=where, why=error.why, fix=error.fix) from error
    return config


def load_weights(file: GGUFFile) -> Any:
    """Return the model with BF16 weights on the CPU. Raise UserError if a tensor of the file or the model is left."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(file.path.parent),
        gguf_file=file.path.name,
        dtype=torch.bfloat16,
        output_loading_info=True,
    )
    model, loading = loaded
    numbers = sum(parameter.numel() for parameter in model.parameters())
    missing = sorted(loading["missing_keys"])
    if missing or numbers != file.numbers:
        why = f"the file has {file.numbers:,} numbers, and the model {numbers:,}"
        if missing:
            why = f"the file has no tensor for {', '.join(missing[:4])}"
        raise UserError(
            f"{file.path} and transformers' {type(model).__name__} do not have the same tensors",
            why=f"{why}; some would be left out, or filled with random numbers",
            fix="use the original model's folder, from which the GGUF file was made",
        )
    return model


def set_ends(model: Any, tokenizer: Any, ends: list[int]) -> None:
    """Set the special tokens in the config and the generation config of `model` to those of `tokenizer`."""
    from transformers import GenerationConfig

    eos = ends[0] if len(ends) == 1 else ends
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": eos,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model.config.update(special)
    model.generation_config = GenerationConfig(**special)


def about_weights(file: GGUFFile) -> list[str]:
    """Return sentences on the types in which the file stores its weights."""
    types = file.stored_types()
    told = [f"{kind.name} (tensors: {kind.tensors}, numbers: {kind.numbers:,})" for kind in types]
    rounded = [kind.name for kind in types if kind.rounded]
    lines = [f"the file's weights are {', '.join(told)}"]
    if rounded:
        lines.append(
            f"those in {', '.join(rounded)} were rounded before: they are not the original model's, and a quantized "
            "scheme rounds them a second time"
        )
    if finer := [kind.name for kind in types if kind.finer_than_bf16]:
        lines.append(
            f"those in {', '.join(finer)} are rounded to BF16, the type of the folder's weights"
        )
    return lines


def about_ends(tokenizer: Any, ends: list[int]) -> list[str]:
    """Return a sentence on generation_config.json."""
    names = " or ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in ends)
    pad = f"{tokenizer.pad_token} ({tokenizer.pad_token_id})"
    return [
        f"generation_config.json: a response ends with {names}, padding is {pad}; a GGUF file holds no temperature or "
        "top_p of the original"
    ]


def digest(file: Path) -> str:
    """Return the SHA-256 of a file, as text."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def write_record(folder: Path, file: Path, lines: list[str]) -> None:
    """Write `RECORD` to `folder`."""
    record = {"file": file.name, "sha256": digest(file), "changes": lines}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' notes and progress bars, which describe files that are put right here."""
    from transformers.utils import logging as notes

    before = notes.get_verbosity()
    notes.set_verbosity(logging.ERROR)
    notes.disable_progress_bar()
    try:
        yield
    finally:
        notes.set_verbosity(before)
        notes.enable_progress_bar()
