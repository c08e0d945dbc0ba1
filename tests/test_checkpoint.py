"""Saved compressed-tensors folders as transformers reads them."""

from __future__ import annotations

import pytest
import torch
from conftest import save_random_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.checkpoint import save_compressed
from qarl.quant import get_scheme, packed_state_dict, quantize


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "w8a8", "fp8"])
def test_transformers_multiplies_by_the_dequantized_weights(folder, tmp_path, name):
    scheme = get_scheme(name, group_size=32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tensors = packed_state_dict(model, scheme=scheme, ignore=("lm_head",))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    saved = save_compressed(tmp_path / name, model, tensors, scheme, ("lm_head",), tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    with torch.no_grad():
        loaded(torch.tensor([[3, 5, 8]]))  # compressed-tensors decompresses at the first forward
    weights = loaded.state_dict()
    for layer, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            expected = module.weight if layer == "lm_head" else quantize(module.weight, scheme).dequantize()
            assert torch.equal(weights[f"{layer}.weight"], expected), layer
