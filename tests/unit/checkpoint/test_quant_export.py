"""Saved compressed-tensors folders as transformers reads them."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_state import small_disk
from random_models import save_random_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.checkpoint.model_files import ModelFiles, save_model
from qarl.checkpoint.storage import StorageError
from qarl.quant import get_scheme, packed_state_dict, quantize


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "w8a8", "fp8"])
def test_transformers_multiplies_by_the_dequantized_weights(folder, tmp_path, name):
    scheme = get_scheme(name, group_size=32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tensors = packed_state_dict(model, scheme=scheme, ignore=("lm_head",))
    files = ModelFiles.of(model, AutoTokenizer.from_pretrained(folder))
    saved = save_model(tmp_path / name, files, tensors, scheme=scheme, ignore=("lm_head",))
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    with torch.no_grad():
        loaded(torch.tensor([[3, 5, 8]]))  # compressed-tensors decompresses at the first forward
    weights = loaded.state_dict()
    for layer, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            expected = (
                module.weight
                if layer == "lm_head"
                else quantize(module.weight, scheme).dequantize()
            )
            assert torch.equal(weights[f"{layer}.weight"], expected), layer


def save_bf16(source, target):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    files = ModelFiles.of(model, AutoTokenizer.from_pretrained(source))
    return save_model(target, files, model.state_dict().items(), scheme=get_scheme("bf16"))


def test_sampling_settings_that_transformers_would_not_save_are_kept(tmp_path):
    source = save_random_model(tmp_path / "source")
    odd = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 1}
    (source / "generation_config.json").write_text(json.dumps(odd))
    saved = json.loads(
        (save_bf16(source, tmp_path / "saved") / "generation_config.json").read_text()
    )
    assert {key: saved.get(key, False) for key in odd} == odd
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    files = ModelFiles.from_folder(source)
    save_model(tmp_path / "again", files, [("a", torch.ones(1))], scheme=get_scheme("bf16"))
    assert (tmp_path / "again" / "generation_config.json").is_file()


def test_a_disk_that_refuses_the_tokenizer_is_a_storage_error(tmp_path):
    source = save_random_model(tmp_path / "source", vocab_size=4096)
    size = (source / "tokenizer.json").stat().st_size
    assert size > 2 * (source / "config.json").stat().st_size
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    files = ModelFiles.of(model, AutoTokenizer.from_pretrained(source))
    with small_disk(size // 2), pytest.raises(StorageError, match=r"(?s)File too large.*quota"):
        save_model(tmp_path / "saved", files, model.state_dict().items(), scheme=get_scheme("bf16"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
