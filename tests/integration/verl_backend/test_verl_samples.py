"""Samples of a verl mini-batch: the same as the local backend's of the same rows; one rank writes them, if asked."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qarl.report.samples import read_samples
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.batch import make_batch
from qarl.trainer.mismatch_watch import log_step_samples
from qarl.trainer.old_log_probs import Measured
from qarl.verl.separate_worker import SeparateActorWorker
from qarl.verl.step_measurements import SAMPLES_IN, log_mini_batch

PROMPTS, RESPONSES = [[7, 8], [9]], [[1, 2, 3], [4]]
OLD, ROLLOUT = [[-1.0, -2.25, -3.0], [-0.25]], [[-1.0, -2.0, -3.0], [-0.5]]
TOKENIZER = SimpleNamespace(decode=lambda ids: ",".join(map(str, ids)))


def nested(rows: list[list[float]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def mini_batch(**changed: Any) -> dict[str, torch.Tensor]:
    data = {
        "prompts": PROMPTS,
        "responses": RESPONSES,
        "response_mask": [[1, 1, 1], [1]],
        "old_log_probs": OLD,
        "rollout_log_probs": ROLLOUT,
        "advantages": [[-1.0] * 3, [1.0]],
        "rm_scores": [[0.0, 0.0, 0.0], [1.0]],
    }
    return {name: nested(rows) for name, rows in (data | changed).items()}


def engine(finished_steps: int, rank: int = 0, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        rank=rank,
        lr_scheduler=SimpleNamespace(last_epoch=finished_steps),
        model_config=SimpleNamespace(tokenizer=TOKENIZER),
        **{
            "version": None,
            "last_step": None,
            "sampled_step": None,
            "optimizer_config": SimpleNamespace(total_training_steps=33),
            **more,
        },
    )


def test_the_last_step_is_logged_where_a_step_has_several_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's optimizer knows the number of updates, here 3 a step."""
    monkeypatch.setenv(SAMPLES_IN, str(tmp_path))
    separate = engine(32 * 3, version=32)
    worker: Any = SimpleNamespace(actor=SimpleNamespace(engine=separate))
    separate.optimizer_config.total_training_steps = 33 * 3
    SeparateActorWorker.set_last_step(worker, 33)
    log_mini_batch(separate, mini_batch())
    assert {sample["step"] for sample in read_samples(tmp_path)} == {33}


def test_both_backends_write_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = RolloutBatch(PROMPTS, RESPONSES, ROLLOUT, ["stop", "stop"], weight_version=0)
    batch = make_batch(rollout, torch.tensor([0.0, 1.0]), torch.tensor([-1.0, 1.0]), pad_token_id=0)
    trainer = SimpleNamespace(report=True, total_training_steps=33)
    local: Any = SimpleNamespace(trainer=trainer, run_dir=tmp_path / "local")
    old = torch.tensor([OLD[0], [*OLD[1], 5.0, 5.0]])
    measured = Measured(old, torch.tensor([True, True]))
    log_step_samples(local, 20, batch, measured, TOKENIZER)
    (tmp_path / "verl").mkdir()
    monkeypatch.setenv(SAMPLES_IN, str(tmp_path / "verl"))
    log_mini_batch(engine(19), mini_batch())
    mine, theirs = read_samples(tmp_path / "local"), read_samples(tmp_path / "verl")
    assert len(mine) == 2 and theirs == [sample | {"finish_reason": None} for sample in mine]


def test_who_writes_and_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_mini_batch(engine(19), mini_batch())
    monkeypatch.setenv(SAMPLES_IN, str(tmp_path / "on another machine"))
    log_mini_batch(engine(19), mini_batch())
    monkeypatch.setenv(SAMPLES_IN, str(tmp_path))
    log_mini_batch(engine(19, rank=1), mini_batch())
    log_mini_batch(engine(20), mini_batch())
    assert list(tmp_path.iterdir()) == []
    data = mini_batch()
    del data["rollout_log_probs"]
    with caplog.at_level(logging.WARNING):
        log_mini_batch(engine(19), data)
    assert (
        "the samples of step 20 were not written" in caplog.text and list(tmp_path.iterdir()) == []
    )
    log_mini_batch(
        engine(32), mini_batch(response_mask=[[1, 0, 1], [1]])
    )  # a token that is not trained has no δ
    written = read_samples(tmp_path)
    assert [(sample["step"], sample["delta"]) for sample in written] == [
        (33, [0.25]),
        (33, [0.0, 0.0, 0.0]),
    ]
