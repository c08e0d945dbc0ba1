"""Write the rows of a source as data files: a folder that appears when it is whole, with a record of what it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from qarl.checkpoint.storage import check_place, whole_folder
from qarl.errors import UserError
from qarl.sources.problems import TRAIN, VALIDATION

RECORD = "source.json"
"""What was asked for. A folder with this file was written by `qarl data`, which may then replace it."""
ENDINGS = ("parquet", "jsonl")
Rows = list[dict[str, Any]]


def check_folder(folder: Path) -> None:
    """Raise UserError if `folder` has files that `qarl data` did not write, because it replaces the whole folder.

    Raise StorageError if the folder cannot be written."""
    check_place(folder)
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    fix = "remove it yourself, or name another folder"
    if names and RECORD not in names:
        raise UserError(
            f"will not replace {folder}, which this command did not write",
            where="out",
            why=f"it has no {RECORD}",
            fix=fix,
        )
    written = {
        RECORD,
        *(f"{split}.{ending}" for split in (TRAIN, VALIDATION) for ending in ENDINGS),
    }
    others = [name for name in names if name not in written]
    if others:
        raise UserError(
            f"will not replace {folder}, which also has files that this command did not write",
            where="out",
            why=f"they would be lost: {', '.join(others[:4])}",
            fix=f"move them away; or {fix}",
        )


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of a folder that `qarl data` wrote: {} if it is damaged, None if there is none."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def refuse_other_data(folder: Path, record: Mapping[str, Any]) -> NoReturn:
    """Raise the UserError about data in `folder` that were made otherwise. `record`: theirs."""
    command = record.get("command")
    words = map(str, command) if isinstance(command, list) else ["an unknown command"]
    raise UserError(
        f"will not replace {folder}, which has data of other arguments or another version of the tasks",
        where="out",
        why=f"they were written by: {' '.join(words)}",
        fix="write to another folder with out=FOLDER, move this one away, or add overwrite=true",
    )


def write_files(
    folder: Path, splits: Mapping[str, Rows], *, ending: str, record: Mapping[str, Any]
) -> dict[str, Path]:
    """Write each split to NAME.ENDING in `folder`, and the record. Return the paths of the splits.

    `ending`: parquet or jsonl. Raise UserError if the disk refuses; the folder is then as it was before."""
    names = {split: f"{split}.{ending}" for split, rows in splits.items() if rows}
    with whole_folder(folder) as new:
        for split, name in names.items():
            write = _write_parquet if ending == "parquet" else _write_json_lines
            write(new / name, splits[split])
        text = json.dumps(record, indent=2, ensure_ascii=False)
        (new / RECORD).write_text(text + "\n", encoding="utf-8")
    return {split: folder / name for split, name in names.items()}


def _write_parquet(path: Path, rows: Rows) -> None:
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    Dataset.from_list(rows).to_parquet(str(path))


def _write_json_lines(path: Path, rows: Rows) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
