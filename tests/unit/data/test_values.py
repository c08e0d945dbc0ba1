"""A reward gets the values that stand in the file, of the same type in both formats."""

import json
from pathlib import Path
from typing import Any

import pytest
from field_values import JSON, TABLE, rows_of, write_rows
from transformers import PreTrainedTokenizerFast

from qarl.data.prompts import Prompt, load_prompts


def seen(file: str, tokenizer: PreTrainedTokenizerFast) -> list[tuple[Any, Any, Any]]:
    prompts: list[Prompt] = load_prompts(file, tokenizer=tokenizer, max_prompt_length=8)
    return [
        (prompt.ground_truth, prompt.extra_info["value"], prompt.extra_info["list"])
        for prompt in prompts
    ]


def wanted(values: list[Any]) -> list[tuple[Any, Any, Any]]:
    return [(value, value, [value]) for value in values]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", TABLE)
def test_both_formats(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, name: str, suffix: str
) -> None:
    values, read = TABLE[name]
    file = write_rows(tmp_path / f"x{suffix}", rows_of(values))
    assert repr(seen(file, tokenizer)) == repr(
        wanted(read)
    )  # repr: 1, 1.0 and True differ, and NaN equals NaN


@pytest.mark.parametrize("name", JSON)
def test_what_only_json_can_hold(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    file = write_rows(tmp_path / "x.jsonl", rows_of(JSON[name]))
    assert repr(seen(file, tokenizer)) == repr(wanted(JSON[name]))


def test_a_list_of_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """One JSON list over several lines, with a byte order mark, as some editors write it."""
    rows = rows_of(TABLE["dates"][0])
    (tmp_path / "x.json").write_text(json.dumps(rows, indent=2), encoding="utf-8-sig")
    assert seen(str(tmp_path / "x.json"), tokenizer) == wanted(TABLE["dates"][0])
