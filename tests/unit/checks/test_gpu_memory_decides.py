"""Recomputation and sequences at once: a GPU's memory decides, a user's key wins, and CPUs are as they were."""

from __future__ import annotations

from typing import Any

import pytest
from memory_cases import SIZES, SMALL, run
from transformers import LlamaConfig

from qarl.checks.gpu_memory_decides import (
    DEFAULT_SEQUENCES,
    MOST_SEQUENCES,
    recomputes_activations,
    sequences_at_once,
)
from qarl.checks.memory import RUNTIME_BYTES, TIGHT, estimate, recomputes
from qarl.config import Config
from qarl.doctor.model import recomputation

LONG: dict[str, Any] = {"data__max_response_length": 100_000}
KEY = "model__gradient_checkpointing"


def needed(config: Config) -> int:
    """Bytes of the update. The GPU's size changes only the engine's share, which sleeps meanwhile."""
    return estimate(SMALL, config, device="cuda", gpu_memory_bytes=2**40).total("update")


def test_a_gpu_recomputes_only_what_its_memory_does_not_hold() -> None:
    config = run(**LONG)
    plain, recomputed = (needed(run(**LONG, **{KEY: value})) for value in (False, True))
    assert recomputed < plain
    enough = int(plain / TIGHT) + 1
    assert not recomputes(SMALL, config, "cuda", enough)
    assert recomputes(SMALL, config, "cuda", enough - 2)
    for memory, expected in ((enough, plain), (enough - 2, recomputed)):
        plan = estimate(SMALL, config, device="cuda", gpu_memory_bytes=memory)
        assert plan.total("update") == expected


@pytest.mark.parametrize("asked", [False, True])
def test_the_users_key_wins(asked: bool) -> None:
    config = run(**LONG, **{KEY: asked})
    assert recomputes(SMALL, config, "cuda", RUNTIME_BYTES) is asked
    assert recomputes(SMALL, config, "cuda", 2**40) is asked
    assert recomputes(SMALL, config, "cpu", 0) is asked


def test_nothing_changes_on_a_cpu() -> None:
    assert run().model.gradient_checkpointing is None
    assert not recomputes(SMALL, run(**LONG), "cpu", 0)
    by_default, plain = (
        estimate(SMALL, run(**changes), device="cpu") for changes in (LONG, LONG | {KEY: False})
    )
    assert by_default == plain


@pytest.mark.parametrize("hf_config", [None, {"num_attention_heads": 4}])
def test_without_sizes_nothing_is_recomputed(hf_config: Any) -> None:
    assert not recomputes_activations(
        run(**LONG), hf_config, device="cuda", gpu_memory_bytes=RUNTIME_BYTES
    )


def test_the_trainer_asks_with_the_models_config() -> None:
    config, hf_config = run(**LONG), LlamaConfig(**SIZES)
    for memory, expected in ((RUNTIME_BYTES, True), (2**40, False), (None, False)):
        assert expected is recomputes_activations(
            config, hf_config, device="cuda", gpu_memory_bytes=memory
        )


def decoded(config: Config, memory: int, *, device: str = "cuda", **sizes: int) -> int:
    hf_config = LlamaConfig(**SIZES | sizes)
    return sequences_at_once(config, hf_config, device=device, gpu_memory_bytes=memory)


def test_a_small_model_decodes_as_many_sequences_as_its_cache_holds() -> None:
    """A token takes 256 bytes of cache, and a sequence 8 + 1000 of 4000 tokens at the mean: 400 are 103 MB."""
    config = run(data__max_response_length=4000)
    room = 400 * 1008 * 256
    without_cache = -estimate(SMALL, config, device="cuda", gpu_memory_bytes=0).kv_cache
    share = config.rollout.gpu_memory_utilization
    assert decoded(config, int((without_cache + room) / share) + 1) == 384, "in steps of 64"
    assert decoded(config, int(without_cache / share)) == DEFAULT_SEQUENCES
    assert decoded(config, 2**40) == MOST_SEQUENCES
    assert decoded(config, 2**40, num_hidden_layers=70_000) == DEFAULT_SEQUENCES, "2.2e9 weights"
    few_tokens = run(data__max_response_length=4000, rollout__max_num_batched_tokens=300)
    assert decoded(few_tokens, 2**40) == 300


def test_the_users_number_of_sequences_wins_and_a_cpu_has_the_default() -> None:
    assert decoded(run(rollout__max_num_seqs=7), 2**40) == 7
    assert decoded(run(rollout__max_num_seqs=7), 0, device="cpu") == 7
    assert decoded(run(), 0, device="cpu") == DEFAULT_SEQUENCES == 256


def test_the_doctor_says_which() -> None:
    assert recomputation(False).status == "ok"
    assert "model.gradient_checkpointing=false" in str(recomputation(True).fix)
