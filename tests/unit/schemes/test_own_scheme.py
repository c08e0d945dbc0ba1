"""A scheme from a user's file: quantized by its own rule, published and exported as what it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from example_plugins import loaded
from random_models import save_random_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.checkpoint.model_files import ModelFiles, save_model
from qarl.config.quant import QuantConfig
from qarl.quant import packed_state_dict, quantize
from qarl.rollout.publish.manifest import check_complete, expected_manifest
from qarl.schemes import (
    Scheme,
    from_quantization_config,
    get_scheme,
    scheme_help,
    scheme_names,
    unregister,
)

NAME = "w4a16_symmetric"
IGNORE = ("lm_head",)


@pytest.fixture(autouse=True, scope="module")
def _plugin() -> Iterator[None]:
    with loaded(own_scheme=lambda: unregister(NAME)):
        yield


@pytest.fixture
def scheme() -> Scheme:
    return get_scheme(QuantConfig(scheme=NAME, group_size=8).scheme, 8)


def by_the_rule(weight: Tensor, group_size: int) -> Tensor:
    """The BF16 weight that scale absmax / 7 and codes -7 to 7 stand for, a step at a time."""
    groups = weight.view(len(weight), -1, group_size)
    absmax = groups.abs().amax(-1, keepdim=True)
    scale = absmax / torch.tensor(7.0, dtype=weight.dtype)
    codes = (groups / scale).round().clamp(-7, 7)
    return (codes.float() * scale.float()).to(weight.dtype).view_as(weight)


def test_its_rule_quantizes(scheme: Scheme) -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    quantized = quantize(weight, scheme).dequantize()
    assert torch.equal(quantized, by_the_rule(weight, group_size=8))
    assert not torch.equal(quantized, quantize(weight, get_scheme("w4a16", 8)).dequantize())


def test_codes_by_hand(scheme: Scheme) -> None:
    """Scale 1: 7 stays 7 and -7 stays -7, where w4a16 has a scale of 7 / 7.5."""
    weight = torch.tensor([[7.0, -7.0, 0.4, -0.6, 3.0, 2.0, 1.0, 0.0]]).bfloat16()
    quantized = quantize(weight, scheme)
    assert quantized.tensors["weight_scale"].tolist() == [[1.0]]
    assert quantized.dequantize().tolist() == [[7.0, -7.0, 0.0, -1.0, 3.0, 2.0, 1.0, 0.0]]


def test_it_is_published_and_exported(scheme: Scheme, tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "model", "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tensors = dict(packed_state_dict(model, scheme=scheme, ignore=IGNORE))
    check_complete(tensors.items(), expected_manifest(model.config, scheme, IGNORE))
    files = ModelFiles.of(model, AutoTokenizer.from_pretrained(folder))
    save_model(tmp_path / "out", files, tensors.items(), scheme=scheme, ignore=IGNORE)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    # The wire says nothing about rounding: a reader sees the first scheme with these tensors.
    assert from_quantization_config(config["quantization_config"]) == get_scheme("w4a16", 8)


def test_the_help_of_the_key_quotes_every_scheme() -> None:
    said = scheme_help()
    assert f"`{NAME}`: int4 weights in groups, scale absmax / 7, and BF16 activations." in said
    help_of_key = QuantConfig.model_fields["scheme"].description or ""
    own = [name for name in scheme_names() if name != NAME]
    assert all(f"`{name}`: " in help_of_key for name in own)
    assert "`fp8`: e4m3 weights with one scale per output channel" in help_of_key


def test_contributing_quotes_the_example() -> None:
    source = (ROOT / "examples/own_scheme.py").read_text(encoding="utf-8")
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert source[source.index("@register") :] in page
