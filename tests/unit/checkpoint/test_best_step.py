"""`step=best`: the checkpoint that best.json names, for an export and an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from qarl.checkpoint.best_step import FILE
from qarl.checkpoint.export import ExportRequest
from qarl.checkpoint.read_weights import find_checkpoint
from qarl.checkpoint.storage import write_json
from qarl.config.command_arguments import read_request
from qarl.errors import UserError
from qarl.eval.arguments import EvalRequest


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "state.json").touch()
    return tmp_path / "run"


def test_it_is_the_step_that_the_file_names(run: Path) -> None:
    write_json(run / FILE, {"step": 2, "accuracy": 0.5, "checkpoint": "checkpoints/step_2"})
    assert find_checkpoint(run, "best").name == "step_2"
    assert find_checkpoint(run, None).name == "step_3"


@pytest.mark.parametrize("content", [None, "", "[]", '{"step": "?"}'])
def test_without_a_file_that_names_one_the_error_says_what_writes_it(
    run: Path, content: str | None
) -> None:
    if content is not None:
        (run / FILE).write_text(content)
    with pytest.raises(UserError, match="names no best checkpoint") as error:
        find_checkpoint(run, "best")
    assert ("trainer.save_best=true" in str(error.value)) == (content is None)
    assert "give step=N" in str(error.value)


@pytest.mark.parametrize("kind", [ExportRequest, EvalRequest])
def test_both_commands_take_it(kind: type, run: Path) -> None:
    words = [f"run={run}", "output=x"] if kind is ExportRequest else [f"model={run}"]
    for step, value in (("best", "best"), ("2", 2)):
        assert read_request(kind, [*words, f"step={step}"], example="").step == value  # type: ignore[attr-defined]  # of either request
    with pytest.raises(UserError, match="step=newest"):
        read_request(kind, [*words, "step=newest"], example="")
