"""Which folders an export may replace: those that an export wrote, and of them none that a run still reads.

An export leaves `MARK` in its folder, a file with the names and sizes of all others, and in a run with its step. So the
folder counts as an export for as long as nobody has put a file into it or written one of its files again.

Exports of version 0.1, and of commits up to 4fc89e9, have no mark. They are known by the names of their files, and by
the form in which QaRL writes `quantization_config`: llm-compressor adds its version and fields without a value. An
unquantized one has nothing of its own, so it counts only as `export` in the folder of a run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qarl.checkpoint.storage import EXPORT, check_place, write_text
from qarl.config.lora import CONFIG_FILE, FOLDER
from qarl.errors import UserError

MARK = "qarl_export.json"
_RENAMED = f"{FOLDER}/{CONFIG_FILE}"
"""It names the folder of its base, which `name_base` changes when the folder has moved."""
_USUAL = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|model\.safetensors\.index|adapter/adapter_config)\.json"
    r"|(merges|vocab)\.txt|chat_template\.jinja|(tokenizer|spiece)\.model"
    r"|(model(-\d+-of-\d+)?|adapter/adapter_model)\.safetensors"
)
_QUANTIZATION_KEYS = {
    "config_groups",
    "format",
    "ignore",
    "quant_method",
    "quantization_status",
}


def write_mark(folder: Path) -> None:
    """Mark the complete model folder `folder` as an export."""
    files = {name: path.stat().st_size for name, path in _files(folder)}
    (folder / MARK).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def record_step(folder: Path, step: int) -> None:
    """Add to the mark of the export in `folder` that it is of `step` of its run."""
    mark = folder / MARK
    if mark.is_file():
        content = json.loads(mark.read_text(encoding="utf-8"))
        write_text(mark, json.dumps(content | {"step": step}, indent=2) + "\n")


def step_of(folder: Path) -> int | None:
    """Return the step of the run after which the export in `folder` was written, or None if no mark says it."""
    try:
        return int(json.loads((folder / MARK).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def why_foreign(folder: Path) -> str | None:
    """Return why `folder`, which exists, is not an export that may be replaced. Return None if it is one, or empty."""
    if not folder.is_dir():
        return "it is a file"
    files = dict(_files(folder))
    if MARK not in files:
        return _unlike_an_older_export(folder, files) if files else None
    try:
        sizes = json.loads(files.pop(MARK).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, LookupError, TypeError):
        return f"its {MARK} is damaged"
    for name, path in files.items():
        if name not in sizes:
            return f"no export wrote its file {name}"
        if name != _RENAMED and path.stat().st_size != sizes[name]:
            return f"its file {name} was changed after the export"
    return None


def check_output(
    output: Path, run: Path, checkpoint: Path, *, model: str | None, overwrite: bool
) -> None:
    """Raise UserError if writing to `output` would change what is no export, or what the run reads, and StorageError
    if it cannot be written.

    `run`: the folder of the run. `checkpoint`: the folder in it, or in a link from it, that is exported. `model`: the
    run's `model.path`."""
    target = output.resolve()
    origin = checkpoint.resolve()
    holds = origin.is_relative_to(target) or run.resolve().is_relative_to(target)
    if holds or target.is_relative_to(origin.parent):
        raise UserError(
            f"output={output} would overwrite checkpoints of the run",
            where=str(checkpoint.parent),
            fix="choose a different folder",
        )
    if model and Path(model).is_dir() and Path(model).resolve().is_relative_to(target):
        raise UserError(
            f"output={output} would overwrite the model that the run starts from",
            where=f"{run}: model.path={model}",
            why="a resume, and an export with an adapter, read it again",
            fix="choose a different folder",
        )
    check_place(output)
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    foreign = why_foreign(output)
    if overwrite and foreign is not None:
        raise UserError(
            f"output={output} is not an export of QaRL",
            why=f"{foreign}, and overwrite=true replaces only what an export has written",
            fix="choose a different folder, or move this one away yourself",
        )
    if not overwrite:
        raise UserError(
            f"output={output} exists and is no empty folder",
            why=None if foreign is None else f"it is not an export of QaRL: {foreign}",
            fix="choose a different folder" + (", or add overwrite=true" if not foreign else ""),
        )


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name, relative to `folder`, and path of everything in it that is not a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix(), path


def _unlike_an_older_export(folder: Path, files: Mapping[str, Path]) -> str | None:
    """Return why a folder without `MARK` was not written by an earlier version, or None if it was."""
    if "config.json" not in files:
        return "it is not a model folder: it has no config.json"
    if alien := [name for name in files if not _USUAL.fullmatch(name)]:
        return f"no export wrote its file {alien[0]}"
    of_run = folder.name == EXPORT and (folder.resolve().parent / "config.yaml").is_file()
    if of_run or _quantized_by_qarl(files["config.json"]):
        return None
    return f"it has no {MARK}, which marks exports, so it may be any other model"


def _quantized_by_qarl(file: Path) -> bool:
    try:
        quantization: Any = json.loads(file.read_text(encoding="utf-8"))["quantization_config"]
        groups = quantization["config_groups"]
        weights = groups["group_0"]["weights"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return set(quantization) == _QUANTIZATION_KEYS and None not in weights.values()
