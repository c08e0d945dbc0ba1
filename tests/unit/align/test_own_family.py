"""A family with another norm, added through public seams only (`tests/support/plugins/one_plus_norm.py`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkout import ROOT
from cpu_features import needs_engine_attention, needs_vllm_cpu

from qarl.align import align_model
from qarl.align.applied_level import model_unavailable
from qarl.align.cpu import add_residual
from qarl.align.model_config import check_config_keys, verdict
from qarl.config.level import Level
from qarl.errors import UserError
from qarl.families import ALIGNED, check_family, family_named, register, unregister
from qarl.families.base import Family
from qarl.plugins import VARIABLE, load_plugins

NAME = "one_plus_norm"
MODULE = f"qarl_plugin_{NAME}"


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "")
        load_plugins([str(ROOT / f"tests/support/plugins/{NAME}.py")])
        yield sys.modules[MODULE]
        unregister(NAME)
        del sys.modules[MODULE]


def config(plugin: Any, **keys: Any) -> Any:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    return plugin.OnePlusConfig(**sizes | keys)


def random_model(plugin: Any) -> Any:
    torch.manual_seed(0)
    model = plugin.OnePlusForCausalLM(config(plugin)).bfloat16()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.normal_(std=0.3)
    return model


@needs_engine_attention
def test_level_model_computes_with_the_familys_own_norm(plugin):
    model = random_model(plugin)
    tokens = torch.arange(24)[None] % 64
    with torch.no_grad():
        before = model(tokens).logits
        report = align_model(model, "model")
        after = model(tokens).logits
    assert report.level >= Level.MODEL
    assert report.replaced["norms"] == 5
    assert isinstance(model.model.norm, plugin.AlignedOnePlusNorm)
    difference = float((after - before).float().norm() / before.float().norm())
    assert 0 < difference < 0.02  # rounds elsewhere, and computes the same model
    model(tokens).logits.float().logsumexp(-1).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.vllm
@needs_vllm_cpu
def test_its_norm_equals_the_engines_over_many_additions(plugin):
    """vLLM's GemmaRMSNorm with a residual, as in `test_align.py` for Llama's."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    with set_current_vllm_config(VllmConfig()):
        engine = GemmaRMSNorm(64, eps=1e-6).bfloat16()
    model = random_model(plugin)
    align_model(model, "model")
    norm = model.model.norm
    engine.weight.data.copy_(norm.weight.data)
    residual = torch.randn(40, 64).bfloat16()
    hidden: torch.Tensor = residual
    with torch.no_grad():
        assert torch.equal(norm(residual), engine.forward_native(residual.clone()))
        for i in range(4):
            output = (torch.randn(40, 64) * 4.0 ** (i - 2)).bfloat16()
            hidden = add_residual(output, hidden)
            expected, residual = engine.forward_native(output.clone(), residual.clone())
            assert torch.equal(norm(hidden), expected.to(norm.weight.dtype))


def test_all_else_derives_from_what_the_family_says(plugin):
    check_family(config(plugin))
    check_config_keys(config(plugin, norm_offset=1))
    assert verdict(NAME, "norm_offset") == "neither: it is always 1"
    assert verdict("llama", "norm_offset") == "neither: the class of this family does not read it"
    with pytest.raises(UserError, match=r"logit_scale=2\.0 in a config of one_plus_norm"):
        check_config_keys(config(plugin, logit_scale=2.0))
    with pytest.raises(UserError, match="unknown key"):
        check_config_keys(config(plugin, norm_shift=1))
    assert model_unavailable(config(plugin), "cuda", torch.bfloat16, (9, 0)) == (
        "is built for one_plus_norm on cpu, not on cuda"
    )


def test_names_are_unique_and_only_aligned_families_register(plugin):
    with pytest.raises(UserError, match="there already is a family 'gemma'"):
        register(Family("gemma", aligned=True))
    with pytest.raises(UserError, match="has no level above linears"):
        register(Family("another", linears_mismatch=1e-3))
    assert family_named(NAME) is ALIGNED[NAME] and "another" not in ALIGNED
