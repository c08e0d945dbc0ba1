"""The comparison of the rotary embeddings of trainer and engine, on rope parameters whose outcome is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from cpu_features import needs_engine_attention

from qarl.align.rotary import EngineRotaryEmbedding, match_rotary

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 32,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "default": ({}, True, True),
    "linear": ({"rope_type": "linear", "factor": 4.0}, True, True),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, True, True),
    "yarn": (YARN, True, True),
    # transformers scales the cosines by attention_factor; vLLM calls it attn_factor and does not read it.
    "yarn_attention_factor": (YARN | {"attention_factor": 0.5}, True, False),
    # vLLM rotates half of each head, transformers' Llama all of it.
    "partial": ({"partial_rotary_factor": 0.5}, False, False),
}
"""Rope parameters -> whether the rotation is equal with the engine's cosines, and near with transformers' own."""


@needs_engine_attention
@pytest.mark.parametrize("name", ROPES)
def test_equal_and_near_are_told_apart(name):
    rope, equal, near = ROPES[name]
    config = transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e4} | rope
    )
    match = match_rotary(config)
    assert (match.equal, match.near) == (equal, near)
    # One BF16 rounding of a cosine is 2^-9 of it at most; a formula of its own is wrong by more than a few percent.
    assert match.error < 2**-8 if near else match.error > 0.05
    assert (match.turns is not None) == equal


@needs_engine_attention
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_the_engines_cosines_are_those_of_the_formula(theta):
    """cos and sin of position * theta^(-2i / D), from float64, rounded to BF16 as vLLM's cache is in a BF16 model."""
    config = transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    embedding = EngineRotaryEmbedding()
    embedding.turns = match_rotary(config).turns
    positions = torch.tensor([[0, 1, 100, 255], [7, 6, 5, 4]])
    angles = positions[..., None].double() * theta ** (
        -torch.arange(0, 32, 2, dtype=torch.float64) / 32
    )
    cosines, sines = embedding(torch.empty(0), positions)
    for turns, exact in ((cosines, angles.cos()), (sines, angles.sin())):
        assert turns.shape == (2, 4, 32)
        # BF16 rounds a number below 1 by at most 2^-9, FP32 an angle of 255 by 255 * 2^-24.
        torch.testing.assert_close(
            turns.double(), exact.repeat(1, 1, 2), rtol=0, atol=2**-9 + 2**-15
        )
