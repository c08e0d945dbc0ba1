"""Write a checkpoint of a run as a model folder. `qarl export` and the end of a verl run use this module.

The backend of the run may be local or verl. For verl, the files of all ranks are merged. The checkpoint's digests or
checksums are checked first, and the checkpoint is never changed. The model folder appears only when it is complete.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qarl.config.errors import nearest
from qarl.errors import UserError

if TYPE_CHECKING:
    import torch

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_KEYS = ("run", "output", "step", "format", "max_shard_size", "overwrite", "trust_remote_code")
_EXPERTS = (
    "transformers cannot load this folder, because it does not read low-bit experts: it initializes them at random, or "
    "fails in the forward. vLLM loads it; both load format=bf16"
)
FORMATS = ("quantized", "bf16", "fp32")
_W4A8 = (
    "Plain vLLM does not compute w4a8: from this folder it computes W4A16 on a CPU, rounds activations to FP8 on a GPU "
    "of capability 9.0, and refuses it on other GPUs"
)


@dataclass(frozen=True)
class ExportRequest:
    """The arguments of the command line. `step`: the step of the checkpoint, or None for the latest one."""

    run: Path
    output: Path
    step: int | None = None
    format: str = "quantized"
    max_shard_bytes: int = 5 * 10**9
    overwrite: bool = False
    trust_remote_code: bool = False


def export(request: ExportRequest) -> str:
    """Write the model folder. Return a line of text about it.

    Raise UserError if the checkpoint is missing or damaged, if the output folder cannot be used, or if the disk is
    full.
    """
    import torch

    from qarl.checkpoint.compressed_tensors import ModelFiles, linears_of, packed, packed_bytes, write_model
    from qarl.checkpoint.open import find_checkpoint, open_source, reading
    from qarl.checkpoint.storage import recover, whole_folder
    from qarl.quant.scheme import get_scheme

    folder = find_checkpoint(request.run, request.step)
    check_output(request.output, folder, overwrite=request.overwrite)
    trust = request.trust_remote_code
    source = open_source(folder, trust_remote_code=trust)
    with reading(folder):
        quant = source.config["quant"]
        scheme = get_scheme(quant["scheme"], group_size=quant["group_size"])
        if request.format != "quantized":
            scheme = get_scheme("bf16")
        files = ModelFiles.from_folder(source.model_folder, trust_remote_code=trust)
        linears = linears_of(source.model_folder, scheme, quant["ignore"], trust_remote_code=trust)
        if request.format == "fp32":
            needed, tensors = 4 * sum(math.prod(shape) for shape in source.shapes.values()), source.fp32()
        else:
            needed = packed_bytes(source.shapes, scheme, linears)
            tensors = packed(source.bf16(), scheme, linears)
    output = request.output.resolve()
    if output.parent.is_dir():
        recover(output.parent, output.name)
    with whole_folder(output, needed_bytes=needed) as partial:
        write_model(
            partial,
            files,
            _read(folder, tensors),
            scheme=scheme,
            ignore=quant["ignore"],
            max_shard_bytes=request.max_shard_bytes,
            dtype=torch.float32 if request.format == "fp32" else torch.bfloat16,
        )
    kind = request.format if request.format != "quantized" else f"quantized, {scheme.name}"
    line = f"{request.output}: step {source.step} of {request.run}, {kind}, {needed / 1e6:.4g} MB of weights"
    experts = any(".experts." in name for name in linears)
    return ". ".join([line, *([_W4A8] if scheme.name == "w4a8" else []), *([_EXPERTS] if experts else [])])


def _read(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    from qarl.checkpoint.open import reading

    with reading(folder):
        yield from tensors


def check_output(output: Path, checkpoint: Path, *, overwrite: bool) -> None:
    """Raise UserError if writing to `output` would change the source checkpoint or overwrite other files."""
    target, origin = output.resolve(), checkpoint.resolve()
    if origin.is_relative_to(target) or target.is_relative_to(origin.parent):
        raise UserError(
            f"output={output} would overwrite checkpoints of the run",
            where=str(checkpoint.parent),
            fix="choose a different folder",
        )
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not output.is_dir():
        raise UserError(f"output={output} is a file", fix="choose the name of a folder")
    if not overwrite:
        raise UserError(f"output={output} exists and is not empty", fix="choose another folder, or add overwrite=true")
    if not (output / "config.json").is_file():
        raise UserError(
            f"output={output} is not a model folder",
            why="overwrite=true replaces only model folders, and this folder has no config.json",
            fix="choose a different folder, or empty it yourself",
        )


def read_request(arguments: Sequence[str]) -> ExportRequest:
    """Parse `arguments`, each of the form key=value. Raise UserError for the first invalid one."""
    values: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in _KEYS:
            guess = nearest(key.lstrip("-"), _KEYS)
            hint = f"did you mean {guess}=...? " if guess else ""
            raise UserError(f"{argument!r} sets none of the keys {', '.join(_KEYS)}", fix=f"{hint}write key=value")
        if key in values or not value:
            problem = "is given twice" if key in values else "has no value"
            raise UserError(f"{key} {problem}", fix=f"write {key}=VALUE")
        values[key] = value
    missing = [key for key in ("run", "output") if key not in values]
    if missing:
        fix = "write qarl export run=runs/NAME output=DIR (all keys: qarl export --help)"
        raise UserError(f"{' and '.join(missing)} missing", fix=fix)
    return ExportRequest(
        run=Path(values["run"]),
        output=Path(values["output"]),
        step=_step(values["step"]) if "step" in values else None,
        format=_one_of("format", values.get("format", "quantized"), FORMATS),
        max_shard_bytes=_size(values.get("max_shard_size", "5GB")),
        overwrite=_flag("overwrite", values),
        trust_remote_code=_flag("trust_remote_code", values),
    )


def _step(text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"step={text} is not a step", fix="write step=N, or leave step out to export the latest")
    return int(text)


def _flag(key: str, values: dict[str, str]) -> bool:
    return _one_of(key, values.get(key, "false"), ("true", "false")) == "true"


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise UserError(f"{key}={value} is not one of {', '.join(choices)}", fix=f"write {key}={choices[0]}")
    return value


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", text)
    try:
        size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    except (ValueError, KeyError):
        size = 0
    if size < 1:
        raise UserError(f"max_shard_size={text} is not a size", fix="write bytes, or a number with KB, MB or GB")
    return size
