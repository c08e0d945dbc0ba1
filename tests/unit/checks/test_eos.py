"""Where responses end: the tokenizer's EOS against those of the model's two config files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from random_models import save_random_model

from qarl.checks.generation import eos_warnings, model_eos
from qarl.checks.model_folder import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EOS is t1 (1) on all sides, t2 (2) pads, t0 (0) is unknown; every other token is a word."""
    return save_random_model(tmp_path_factory.mktemp("model"))


def edited(folder: Path, tmp_path: Path, **files: Any) -> Path:
    """A copy with keys of config.json, generation_config.json and tokenizer_config.json changed; None drops one, and a
    whole file if it is no dict."""
    copy = Path(shutil.copytree(folder, tmp_path / "model", dirs_exist_ok=True))
    for name, changes in files.items():
        path = copy / f"{name}.json"
        if changes is None:
            path.unlink()
            continue
        if isinstance(changes, str):
            path.write_text(changes)
            continue
        content = json.loads(path.read_text()) | changes
        path.write_text(
            json.dumps({key: value for key, value in content.items() if value is not None})
        )
    return copy


def warnings_of(folder: Path) -> list[str]:
    tokenizer, hf_config = load_tokenizer(str(folder))
    return eos_warnings(str(folder), tokenizer, hf_config)


AGREE: list[dict[str, Any]] = [
    {},
    {"generation_config": None},
    {"generation_config": None, "config": {"eos_token_id": [2, 1]}},
    {"config": {"eos_token_id": None}},
]

WARN: list[tuple[dict[str, Any], str]] = [
    (
        {"generation_config": {"eos_token_id": 2}},
        r"tokenizer's EOS is 1 \('t1'\), but generation_config.json says 2",
    ),
    ({"generation_config": None, "config": {"eos_token_id": 2}}, "config.json says 2"),
    (
        {"tokenizer_config": {"eos_token": None}},
        "EOS is no token, but generation_config.json says 1",
    ),
    (
        {
            "tokenizer_config": {"eos_token": None},
            "config": {"eos_token_id": None},
            "generation_config": {"eos_token_id": None},
        },
        "neither",
    ),
]


@pytest.mark.parametrize(
    ("files", "message"), [*((files, None) for files in AGREE), *WARN], ids=str
)
def test_a_difference_is_worth_a_warning(
    folder: Path, tmp_path: Path, files: dict[str, Any], message: str | None
) -> None:
    warnings = warnings_of(edited(folder, tmp_path, **files))
    assert warnings == [] if message is None else re.search(message, *warnings), warnings


@pytest.mark.parametrize("files", [*AGREE, *(files for files, _ in WARN)], ids=str)
def test_these_are_the_ids_that_vllm_stops_at(
    folder: Path, tmp_path: Path, files: dict[str, Any]
) -> None:
    """vLLM's own code, without an engine: the config it reads, and what it adds to a request."""
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm.transformers_utils.config import try_get_generation_config

    model = edited(folder, tmp_path, **files)
    tokenizer, hf_config = load_tokenizer(str(model))
    config = try_get_generation_config(str(model), trust_remote_code=False)
    params = SamplingParams()
    params.update_from_generation_config(
        config.to_diff_dict() if config else {}, tokenizer.eos_token_id
    )
    theirs = {params.eos_token_id, *(params.stop_token_ids or [])} - {None}
    assert theirs == {tokenizer.eos_token_id, *model_eos(str(model), hf_config)[1]} - {None}
