"""The noise of a model, measured on the trainer alone, is that of its roundings, and small next to wrong models."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from family_models import random_model

from qarl.align.levels import engine_arithmetic
from qarl.align.rounding_noise import Roots, other_roundings
from qarl.config.level import Level
from qarl.config.lora import LoraConfig
from qarl.kernels.cpu import bf16_linear
from qarl.lora.layers import Adapters
from qarl.metrics.mismatch_limit import times_noise
from qarl.quant.convert import published_forward, quantize_model
from qarl.schemes import get_scheme

TOKENS = torch.randint(1, 64, (4, 32), generator=torch.Generator().manual_seed(0))
SCHEME = get_scheme("w4a16", group_size=32)


def log_probs(model):
    logits = model(TOKENS).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, TOKENS[:, 1:, None])[..., 0]


def times(model, other) -> float:
    with torch.no_grad():
        rollout, roots = log_probs(other), Roots()
    roots.add(model, lambda: log_probs(model), rollout, torch.ones(rollout.shape))
    assert roots.tokens == rollout.numel()
    return times_noise(roots.delta, roots.noise, roots.tokens)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "qwen3_moe", "falcon"])
def test_an_unrounded_model_is_within_the_noise_and_other_models_are_not(family):
    unrounded = random_model(family)
    model = copy.deepcopy(unrounded).bfloat16()
    unrounded.load_state_dict(model.state_dict())
    limit = Level.LINEARS.tolerance.noise_limit(TOKENS[:, 1:].numel())
    assert times(model, unrounded) < limit
    rotary = unrounded.base_model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * 0.9
    assert times(model, unrounded) > 2 * limit


def test_the_same_model_has_no_delta_and_its_forward_is_restored():
    model = random_model("qwen3").bfloat16()
    before, state = log_probs(model), torch.random.get_rng_state()
    with other_roundings(model, seed=0):
        assert not torch.equal(log_probs(model), before)
    with other_roundings(model, seed=0), torch.no_grad():
        first = log_probs(model)
    with other_roundings(model, seed=0), torch.no_grad():
        assert torch.equal(log_probs(model), first)
    assert times(model, model) == 0
    assert torch.equal(log_probs(model), before) and torch.equal(
        torch.random.get_rng_state(), state
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_published_forward_is_that_of_the_quantized_model(family):
    model = random_model(family).bfloat16()
    quantized = copy.deepcopy(model)
    quantize_model(quantized, scheme=SCHEME)
    with torch.no_grad():
        before, wanted = log_probs(model), log_probs(quantized)
        with published_forward(model, SCHEME, ("lm_head",)):
            assert torch.equal(log_probs(model), wanted)
            with other_roundings(model, seed=0):
                assert not torch.equal(log_probs(model), wanted)
        assert torch.equal(log_probs(model), before) and not torch.equal(before, wanted)
        with published_forward(quantized, SCHEME, ("lm_head",)):
            assert torch.equal(log_probs(quantized), wanted)


def test_the_engines_arithmetic_with_amx_is_below_the_adapters(monkeypatch):
    """On any CPU: with AMX the product of a BF16 linear is another one, to which its adapter is added."""
    model = random_model("qwen3").bfloat16()
    model.config.layer_types = ["full_attention"] * 2
    adapters = Adapters(model, LoraConfig(r=8), seed=0, base="base")
    products = []
    for name in ("_is_amx_tile_supported", "_init_amx"):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    monkeypatch.setattr(
        bf16_linear, "linear", lambda x, *weights: products.append(1) or F.linear(x, *weights)
    )
    outputs = []
    for size in (0.0, 1.0):
        for layer in adapters.layers.values():
            torch.nn.init.constant_(layer.lora_B, size)
        with torch.no_grad(), engine_arithmetic(model):
            outputs.append(log_probs(model))
    assert len(products) >= 2 * len(adapters.layers) and not torch.equal(*outputs)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mistral"])
def test_the_engines_arithmetic_is_taken_back_where_the_family_has_it(family):
    model = random_model(family).bfloat16()
    if family != "mistral":
        model.config.layer_types = ["full_attention"] * 2
    classes = {name: type(module) for name, module in model.named_modules()}
    attention = model.config._attn_implementation
    with torch.no_grad():
        before = log_probs(model)
        with engine_arithmetic(model) as level:
            assert level == (None if family == "mistral" else Level.MODEL)
            assert torch.equal(log_probs(model), before) == (level is None)
        assert torch.equal(log_probs(model), before)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert model.config._attn_implementation == attention
