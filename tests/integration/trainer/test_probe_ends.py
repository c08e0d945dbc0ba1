"""The probe before training with rollout.min_tokens: trainer and engine leave out the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpu_features import needs_w4a16_cpu
from engine_helpers import config

from qarl.trainer.local import LocalTrainer
from qarl.trainer.prepare import prepare_run
from qarl.trainer.probe import compare

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]


@pytest.mark.parametrize(
    "keys", [["rollout.min_tokens=7"], ["rollout.min_tokens=7", "rollout.top_k=12"]]
)
def test_the_probe_finds_no_mismatch(tmp_path: Path, keys: list[str]) -> None:
    settings = config(tmp_path, "name=probe", "rollout.temperature=1.5", *keys)
    trainer = LocalTrainer(settings, prepare_run(settings))
    with trainer.engine:
        trainer.publish()
        assert compare(trainer).metrics["mismatch/abs_max"] == 0.0
