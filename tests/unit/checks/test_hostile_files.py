"""Damaged files of a model, and of a verl checkpoint: always a UserError, and no code of a file runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_state import Malicious

from qarl.checkpoint.export import ExportRequest, export
from qarl.checks.generation import eos_warnings
from qarl.checks.layers import meta_model
from qarl.checks.model_folder import compared_tensors, load_tokenizer, weight_files
from qarl.errors import UserError

CONTENT = {"empty": b"", "binary": bytes(range(256)) * 8}


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ],
)
@pytest.mark.parametrize("kind", CONTENT)
def test_model_files(pristine_model: Path, tmp_path: Path, name: str, kind: str) -> None:
    folder = Path(shutil.copytree(pristine_model, tmp_path / "model"))
    (folder / name).write_bytes(CONTENT[kind])
    with pytest.raises(UserError):
        tokenizer, hf_config = load_tokenizer(str(folder))
        eos_warnings(str(folder), tokenizer, hf_config)
        compared_tensors(weight_files(str(folder)), meta_model(hf_config))


@pytest.mark.parametrize(
    "content", [{"a": Malicious(Path("ran"))}, [torch.ones(2)]], ids=["malicious", "list"]
)
def test_shards_of_a_verl_checkpoint(
    pristine_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    actor = tmp_path / "run" / "checkpoints" / "global_step_1" / "actor"
    shutil.copytree(
        pristine_model, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors")
    )
    torch.save({}, actor.parent / "data.pt")
    torch.save(content, actor / "model_world_size_1_rank_0.pt")
    (tmp_path / "run" / "config.yaml").write_text(
        "quant: {scheme: bf16, group_size: 32, ignore: [lm_head]}\n"
    )
    with pytest.raises(UserError, match=r"model_world_size_1_rank_0.pt cannot be used"):
        export(ExportRequest(tmp_path / "run", tmp_path / "out", format="bf16"))
    assert not (tmp_path / "ran").exists()
