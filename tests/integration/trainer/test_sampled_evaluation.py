"""Evaluations with several sampled answers: how many each prompt gets, and that the same policy gets the same ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cpu_features import needs_w4a16_cpu
from engine_helpers import config

from qarl.data.rows import read_rows
from qarl.trainer.local import LocalTrainer
from qarl.trainer.prepare import prepare_run

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]


def test_sampled_answers_of_an_evaluation(tmp_path: Path) -> None:
    """Rows with their own number get that, rows beside them one, and without the column `val_n` counts."""
    rows = [dict(row) for row in read_rows("data/column_addition/test.parquet")][:6]
    plain = tmp_path / "plain.jsonl"
    plain.write_text("\n".join(map(json.dumps, rows)))
    rows[0]["__rollout_n__"] = 3
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(map(json.dumps, rows)))
    settings = config(
        tmp_path,
        f"data.val_files=[{plain}]",
        "rollout.val_temperature=1.0",
        "rollout.val_n=4",
    )
    trainer = LocalTrainer(settings, prepare_run(settings))
    asked: list[int] = []
    generate = trainer.generate

    def counted(prompts, sampling, seeds=None):
        asked.append(len(prompts))
        assert sampling.temperature == 1.0 and seeds is not None and len(set(seeds)) == len(seeds)
        return generate(prompts, sampling, seeds)

    trainer.generate = counted  # type: ignore[method-assign]  # counts the requests
    with trainer.engine:
        trainer.publish()
        first = trainer.evaluate()
        assert asked == [24]
        names = {"val/accuracy", "val/best@2", "val/best@4", "val/maj@4"}
        assert {*first} == {f"{name}{end}" for name in names for end in ("", "_low", "_high")}
        assert first["val/best@4"] > first["val/best@2"] > first["val/accuracy"] > 0
        assert 0 < first["val/accuracy_low"] < first["val/accuracy"] < first["val/accuracy_high"]
        assert first["val/maj@4"] <= first["val/best@4"]
        trainer.step += 1
        assert trainer.evaluate() == first
        other = config(tmp_path, f"data.val_files=[{own}]", "rollout.val_temperature=1.0")
        trainer.parts.val_prompts = prepare_run(other).val_prompts
        asked.clear()
        trainer.evaluate()
    assert asked == [8]
