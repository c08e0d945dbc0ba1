"""A training step of a model whose positions scripts/stretch_positions.py has stretched, beyond the original ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from checkout import ROOT
from cpu_features import needs_w4a16_cpu
from engine_helpers import config
from random_models import save_random_model

from qarl.trainer.local import LocalTrainer
from qarl.trainer.prepare import prepare_run

sys.path.insert(0, str(ROOT / "scripts"))
from random_model import write_prompts
from stretch_positions import Stretching, stretch

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]
ORIGINAL, POSITIONS, RESPONSE = 48, 240, 208
LEAST = 100
"""Tokens of each response: twice the original positions, in which a random model could end all of them."""


def test_the_mismatch_of_long_responses_is_0(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", max_position_embeddings=ORIGINAL)
    stretch(Stretching(model, tmp_path / "stretched", POSITIONS))
    prompts = tmp_path / "prompts.jsonl"
    write_prompts(prompts, vocabulary=64)
    settings = config(
        tmp_path,
        "name=stretched",
        f"model.path={tmp_path / 'stretched'}",
        f"data.train_files=[{prompts}]",
        "data.val_files=[]",
        "data.train_batch_size=2",
        f"data.max_prompt_length={POSITIONS - RESPONSE}",
        f"data.max_response_length={RESPONSE}",
        f"reward.function={ROOT}/scripts/random_model.py:reward",
        "rollout.n=4",
        f"rollout.min_tokens={LEAST}",
        "actor.ppo_mini_batch_size=2",
        "actor.ppo_micro_batch_size_per_gpu=4",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.save_final=false",
    )
    trainer = LocalTrainer(settings, prepare_run(settings))
    with trainer.engine:
        trainer.publish()
        batch, _ = trainer.rollout()
        step = trainer.train_step()
    assert int(batch.response_lengths.min()) >= LEAST > ORIGINAL
    assert step["response_length/min"] >= LEAST
    assert step["mismatch/abs_max"] == 0.0
    assert step["actor/grad_norm"] > 0
