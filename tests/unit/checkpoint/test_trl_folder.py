"""The folder of a TRL training in place of a run: each command says what it is and what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from qarl.checkpoint.read_weights import find_checkpoint
from qarl.checkpoint.trl_folder import newest_of_trl
from qarl.errors import UserError
from qarl.eval.arguments import EvalRequest, settings_of
from qarl.report.__main__ import main as report


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Names as transformers' Trainer writes them: checkpoint-10 is newer than checkpoint-9."""
    for step in (9, 10):
        folder = tmp_path / "trl" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        for file in ("config.json", "trainer_state.json", "qarl.json"):
            (folder / file).write_text("{}")
    (tmp_path / "trl" / "checkpoint-11").mkdir()  # of a training that was killed meanwhile
    return tmp_path / "trl"


def test_the_newest_checkpoint_is_that_of_the_last_step(trained: Path) -> None:
    assert newest_of_trl(trained) == trained / "checkpoint-10"
    assert newest_of_trl(trained / "checkpoint-9") == trained / "checkpoint-9"
    assert newest_of_trl(trained.parent) is None and newest_of_trl(trained / "nothing") is None


def test_an_export_names_the_method_that_writes_one(trained: Path) -> None:
    with pytest.raises(UserError, match="was written by TRL") as error:
        find_checkpoint(trained, None)
    assert "trainer.save_quantized(FOLDER)" in str(error.value)
    assert f"resume_from_checkpoint={trained / 'checkpoint-10'}" in str(error.value)
    with pytest.raises(UserError, match="was written by TRL"):
        find_checkpoint(trained / "checkpoint-9", None)


def test_an_evaluation_names_the_checkpoint_that_it_can_score(trained: Path) -> None:
    with pytest.raises(UserError, match="was written by TRL") as error:
        settings_of(EvalRequest(trained))
    assert f"qarl eval {trained / 'checkpoint-10'} files=" in str(error.value)
    request = EvalRequest(trained / "checkpoint-10", files="test.parquet")
    assert settings_of(request).files == ("test.parquet",), "it is a model folder"


def test_a_report_says_where_the_curves_are(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report([str(trained)]) == 2
    assert "was written by TRL" in (said := capsys.readouterr().err) and "report_to" in said
    assert report([str(trained.parent)]) == 2
    assert "no metrics to read" in capsys.readouterr().err
