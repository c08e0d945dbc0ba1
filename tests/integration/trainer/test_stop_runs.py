"""Whole runs with rollout.stop, stop_token_ids and min_tokens: where responses end, and that δ stays 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cpu_features import needs_w4a16_cpu
from engine_helpers import config
from transformers import AutoTokenizer

from qarl.trainer.local import LocalTrainer
from qarl.trainer.prepare import prepare_run

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]
SMALL = (
    "data.train_batch_size=2",
    "rollout.n=4",
    "actor.ppo_mini_batch_size=1",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "actor.mask_truncated_responses=true",
    "trainer.total_training_steps=2",
    "trainer.val_max_prompts=4",
    "trainer.save_final=false",
)
MIN = 7
CASES: dict[str, tuple[str, ...]] = {
    "a text": ("rollout.stop=['+']",),
    "an id": ("rollout.stop_token_ids=[PLUS]",),
    "least tokens": (f"rollout.min_tokens={MIN}", "rollout.temperature=1.5"),
    "both, and top-k": (
        "rollout.stop=['+', '=']",
        f"rollout.min_tokens={MIN}",
        "rollout.top_k=12",
        "rollout.temperature=1.5",
    ),
    "without the rollout's own": (
        "rollout.stop=['+']",
        f"rollout.min_tokens={MIN}",
        "actor.old_log_probs=recompute",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_two_steps(tmp_path: Path, name: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained("models/tiny-qwen3")
    plus = tokenizer.convert_tokens_to_ids("+")
    keys = [key.replace("PLUS", str(plus)) for key in CASES[name]]
    settings = config(tmp_path, "name=ends", *SMALL, *keys)
    trainer = LocalTrainer(settings, prepare_run(settings))
    with trainer.engine:
        trainer.publish()
        rows = [trainer.train_step() for _ in range(2)]
        batch, metrics = trainer.rollout()
        evaluation = trainer.evaluate()
    assert evaluation
    for row in rows:
        assert row["mismatch/abs_max"] == 0.0
    texts = [
        [tokenizer.decode([token]) for token in row[:n]]
        for row, n in zip(batch.responses.tolist(), batch.response_lengths.tolist(), strict=True)
    ]
    stops = ("+" if name == "an id" else "<|eos|>", *settings.rollout.stop)
    least = settings.rollout.min_tokens
    ended = set()
    for tokens, reason in zip(texts, batch.finish_reasons or (), strict=True):
        assert len(tokens) > least or reason == "length"
        assert not any(stop in token for stop in stops for token in tokens[least:-1])
        if reason == "stop":
            ended.add(tokens[-1].strip())
    assert ended <= {"<|eos|>", *stops}
    assert name == "least tokens" or ended & {"+", "="}
    assert metrics["overlong/masked_frac"] == metrics["response_length/clip_ratio"]
