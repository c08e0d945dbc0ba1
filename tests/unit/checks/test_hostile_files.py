"""Damaged files of a model, and of a verl checkpoint: always a UserError, and no code of a file runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_state import Malicious
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qarl.checkpoint.export import ExportRequest, export
from qarl.checkpoint.model_files import read_tensors
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


@pytest.mark.parametrize("index", ["old", "damaged", "of lost files"])
def test_beside_a_whole_file_an_index_counts_as_little_as_for_transformers(
    pristine_model: Path, tmp_path: Path, index: str
) -> None:
    """transformers reads model.safetensors, and so do the checks, a KL reference and the base of adapters."""
    folder = Path(shutil.copytree(pristine_model, tmp_path / "model"))
    whole = load_file(folder / "model.safetensors")
    other = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    shard = "model-00001-of-00001.safetensors"
    if index == "old":
        save_file(other, folder / shard, metadata={"format": "pt"})
    content = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(whole, shard)})
    (folder / "model.safetensors.index.json").write_text("{" if index == "damaged" else content)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(loaded[name], whole[name].bfloat16()), "what transformers reads"
    assert weight_files(str(folder)) == [folder / "model.safetensors"]
    assert torch.equal(dict(read_tensors(folder))[name], whole[name])


def test_without_a_whole_file_the_index_says_what_is_read(
    pristine_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(pristine_model, tmp_path / "model"))
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file({"model.extra": torch.zeros(1)}, folder / "other.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(whole, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    AutoModelForCausalLM.from_pretrained(folder)
    assert weight_files(str(folder)) == [folder / "model-1.safetensors"]
