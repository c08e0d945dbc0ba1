"""The floor counts every product of a step once, and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from qarl.bench import floor, report
from qarl.bench.floor import Products, Shape, Work, floor_phases, rollout_products, update_products


def flop(products: list[Products]) -> int:
    return sum(2 * p.rows * p.shape.outputs * p.shape.inputs * p.times for p in products)


def tiny() -> Any:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


WORK = Work.of(tiny(), sequences=6, prompt=5, response=4, micro_batch=2)


def test_the_linears_are_those_of_the_layers() -> None:
    shapes = {Shape(32, 32): 6, Shape(16, 32): 6, Shape(64, 32): 6, Shape(32, 64): 3}
    assert Counter(shapes) == WORK.linears
    assert Shape(128, 32) == WORK.head


def test_the_numbers_of_operations_by_hand() -> None:
    weights = 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
    head = 128 * 32
    # Six prompts of five tokens, and three decode steps; lm_head before each of four tokens.
    assert flop(rollout_products(WORK)) == 2 * 6 * ((5 + 3) * weights + 4 * head)
    # Forward, input gradient and weight gradient of six rows of nine tokens.
    assert flop(update_products(WORK)) == 3 * 2 * 6 * (9 * weights + 4 * head)
    assert {product.rows for product in update_products(WORK)} == {2 * 9, 2 * 4}


def test_a_shared_prompt_is_counted_once() -> None:
    """Two prompts of five tokens with three responses each, of which micro-batches have two or four."""
    weights = 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
    head = 128 * 32
    shared = replace(WORK, responses=3, cached=4, shared=True)
    # Five tokens of two prompts, one token of four others, and three decode steps.
    prefill = 2 * 5 + 4 * 1
    assert flop(rollout_products(shared)) == 2 * ((prefill + 6 * 3) * weights + 6 * 4 * head)
    # In each of three micro-batches one prompt and two responses.
    assert flop(update_products(shared)) == 3 * 3 * 2 * ((5 + 2 * 4) * weights + 2 * 4 * head)
    larger = replace(shared, micro_batch=4)
    assert larger.micro_batch_tokens == 2 * 5 + 4 * 4


def test_each_kind_has_the_shape_of_its_gradient() -> None:
    x, weight, grad = torch.randn(5, 3), torch.randn(7, 3), torch.randn(5, 7)
    shapes = {kind: tuple(f(x, weight, grad).shape) for kind, f in floor.KINDS.items()}
    assert shapes == {"forward": (5, 7), "input_gradient": (5, 3), "weight_gradient": (7, 3)}


def test_seconds_are_those_of_a_call_times_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(floor.time, "perf_counter", lambda: float(next(clock)))  # a call takes one
    phases = floor_phases(WORK)
    assert phases["floor.rollout"] == 4 + 21 * (1 + 3)
    assert phases["floor.update"] == 3 * 3 * (1 + 21)
    assert phases["floor"] == phases["floor.rollout"] + phases["floor.update"]


def test_the_table_has_the_ratio() -> None:
    seconds = {"rollout": 3.0, "update": 4.0, "step": 8.0}
    seconds |= {"floor.rollout": 2.0, "floor.update": 2.0, "floor": 4.0}
    phases = {name: {"samples": [[value]]} for name, value in seconds.items()}
    result = {"scheme": "w8a8", "level": "model", "phases": phases}
    table = report._floor({"kind": "steps", "results": [result]})
    assert (
        "| w8a8 | `model` | 2 (2-2) | 1.50 (1.50-1.50) | 2 (2-2) | 2.00 (2.00-2.00) | 4 (4-4) |"
        in table
    )
    del phases["floor"], phases["floor.rollout"], phases["floor.update"]
    assert report._floor({"kind": "steps", "results": [result]}) == ""
