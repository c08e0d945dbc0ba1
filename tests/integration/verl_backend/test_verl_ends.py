"""How a verl run ends, through `qarl train`: each end with each shape of evaluation.

Ray and verl's trainer are replaced by a stand-in for `run_ppo`, verl's function that runs them. It logs by verl's own
logger, has the metrics of an evaluation from the trainer itself, and leaves checkpoints of verl's layout, from which
the export is a real one. `tests/nightly` has whole runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ends import BOOM, STEPS, End, cells, check_end, expected_accuracies, restored_limit, write_run

pytest.importorskip("verl")
import ray
from verl_ends import DEAD, MEMORY, RunPPO, at, fail, of_task

from qarl.errors import UserError, first_cause
from qarl.metrics.tracker import read_metrics
from qarl.train import main
from qarl.verl.followed_log import our_names
from qarl.verl.trainer import QaRLTrainerSync, answer_figures

RUN = Path("runs/bad")
pytestmark = pytest.mark.usefixtures("hang_ups_are_forgotten")


NO_REWARD = UserError(
    "the reward failed", where="score", why="LookupError: no verdict", fix="make it return a score"
)
EARLY = "the run ended after step 1 of 3, before the checkpoint of its last step"
ENDS: dict[str, tuple[Callable[[], dict[str, Callable[[int], None]]], End]] = {
    "finished": (dict, End(0, finished=True)),
    "an error in a rank": (
        lambda: {"at_step": at(2, fail(of_task(RuntimeError(BOOM))))},
        End(1, failed=f"RuntimeError: {BOOM}", export=False, not_exported=EARLY),
    ),
    "an error of the reward": (
        lambda: {"at_step": at(2, fail(of_task(NO_REWARD)))},
        End(
            2,
            said="LookupError: no verdict",
            failed="the reward failed",
            export=False,
            not_exported=EARLY,
        ),
    ),
    "an error after the last checkpoint": (
        lambda: {"after": at(STEPS, fail(of_task(NO_REWARD)))},
        End(2, said="LookupError: no verdict", failed="the reward failed"),
    ),
    "Ctrl-C": (
        lambda: {"at_step": at(2, lambda: signal.raise_signal(signal.SIGINT))},
        End(130, said="stopping verl now", export=False, not_exported="the run was interrupted"),
    ),
    "SIGHUP": (
        lambda: {"at_step": at(2, lambda: signal.raise_signal(signal.SIGHUP))},
        End(129, said="stopping verl now", export=False, not_exported="the run was interrupted"),
    ),
    "a lost engine": (
        lambda: {"at_step": at(2, fail(of_task(ray.exceptions.ActorDiedError())))},
        End(2, said=DEAD, failed=DEAD, export=False, not_exported=EARLY),
    ),
    "no memory": (
        lambda: {"at_step": at(2, fail(of_task(ray.exceptions.OutOfMemoryError(MEMORY))))},
        End(2, said="Ray has killed", failed="22.9GB / 23.0GB", export=False, not_exported=EARLY),
    ),
}


@pytest.fixture
def train(
    startable_run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Any:
    """`qarl train` of a run with a shape of evaluation and a stand-in. Returns the exit code and what it printed."""
    monkeypatch.setattr("qarl.verl.run.runs_on_cpu", lambda backend: True)

    def run(shape: str, run_ppo: Callable[..., None], *overrides: str) -> tuple[int, str]:
        monkeypatch.setattr("verl.trainer.main_ppo.run_ppo", run_ppo)
        keys = ["backend=verl", "trainer.n_gpus_per_node=1", "actor.ppo_micro_batch_size_per_gpu=4"]
        try:
            given = dict(word.split("=", 1) for word in [*write_run(shape), *keys, *overrides])
            code = main(["config=run.yaml", *(f"{key}={value}" for key, value in given.items())])
        except RuntimeError as error:  # Python shows it with its traceback, and ends with 1
            assert BOOM in str(first_cause(error))
            code = 1
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return run


@pytest.mark.parametrize(("name", "shape"), cells(ENDS))
def test_every_end_with_every_shape_of_evaluation(train, name, shape):
    acts, end = ENDS[name]
    plots = f"trainer.plots={str(name == 'finished').lower()}"
    code, printed = train(shape, RunPPO(shape, **acts()), plots)
    check_end(RUN, end, shape, code, printed)
    if end.code == 2 and not end.export:
        assert "there is no export: the run ended after step 1 of 3" in printed


@pytest.mark.parametrize(
    "saved", [False, True], ids=["no checkpoint before", "a checkpoint before"]
)
def test_an_export_onto_a_full_disk_says_what_there_is_and_a_resume_makes_it(train, saved):
    end = End(
        2,
        said="could not be exported",
        failed="could not be exported",
        export=False,
        not_exported="too large",
    )
    with restored_limit() as fill_the_disk:
        code, printed = train("one source", RunPPO("one source", after=at(STEPS, fill_the_disk)))
    check_end(RUN, end, "one source", code, printed)
    assert "the newest checkpoint is runs/bad/checkpoints/global_step_3" in printed
    assert "`qarl export run=runs/bad step=3 output=FOLDER` exports this checkpoint" in printed
    evaluated = RunPPO("one source", at_step=lambda step: pytest.fail("a step was taken again"))
    code, printed = train("one source", evaluated)
    check_end(RUN, End(0, finished=True), "one source", code, printed)
    assert json.loads((RUN / "summary.json").read_text())["steps"] == STEPS


def test_an_interrupt_in_the_last_evaluation_costs_neither_a_step_nor_the_evaluation(train):
    """verl saves the last step, evaluates, and only then logs both."""
    keys = ("one source", RunPPO("one source", after=at(STEPS, press_ctrl_c)))
    code, printed = train(*keys, "trainer.val_before_train=false")
    assert code == 130, printed
    again = RunPPO("one source", at_step=lambda step: pytest.fail("a step was taken again"))
    code, printed = train("one source", again, "trainer.val_before_train=false")
    assert code == 0, printed
    ended = json.loads((RUN / "summary.json").read_text())
    assert ended["finished"] is True and ended["steps"] == STEPS
    assert ended["accuracy_after"] == 0.5 and ended["accuracy_before"] is None


def test_a_run_that_resumes_after_its_last_evaluation_makes_no_other(train):
    """Only its export was missing."""
    with restored_limit() as fill_the_disk:
        lose_the_export = RunPPO("one source", after=at(STEPS, fill_the_disk))
        assert train("one source", lose_the_export, "trainer.val_before_train=false")[0] == 2
    again = RunPPO("one source")
    again.evaluation = lambda: pytest.fail("it evaluates again")
    code, printed = train("one source", again, "trainer.val_before_train=false")
    assert code == 0, printed
    assert json.loads((RUN / "summary.json").read_text())["accuracy_after"] == 0.5


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_run_without_room_is_refused_before_ray_starts(train, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    code, printed = train("one source", RunPPO("one source", at_step=fail(RuntimeError(BOOM))))
    assert code == 2 and printed.count("error: ") == 1, printed
    assert "there is no room for runs/bad" in printed and "one checkpoint" in printed
    assert "starting Ray" not in printed and not RUN.exists()


def lose_the_metrics() -> None:
    (RUN / "metrics.jsonl").unlink()
    (RUN / "metrics.jsonl").mkdir()


def lose_verls_log() -> None:
    Path(os.environ["VERL_FILE_LOGGER_PATH"]).unlink()


LOSSES = {
    "the metrics": (lose_the_metrics, "metrics.jsonl could not be written"),
    "verl's log": (lose_verls_log, "verl.jsonl could not be read"),
}


@pytest.mark.parametrize("lost", LOSSES)
def test_lost_metrics_keep_no_export_from_being_written(train, lost):
    lose, said = LOSSES[lost]
    code, printed = train("one source", RunPPO("one source", after=at(STEPS, lose)))
    assert code == 2 and "Traceback" not in printed, printed
    assert said in printed[printed.rindex("\nerror: ") :].splitlines()[1], printed
    assert (RUN / "export" / "model.safetensors").is_file()
    summary = json.loads((RUN / "summary.json").read_text())
    assert (
        summary["finished"] is True
        and summary["steps"] in (0, STEPS - 1, STEPS)
        and summary["failed"]
    )


def test_a_run_without_its_folder_ends_with_one_error(train):
    """The checkpoints that verl goes on to write are in a new folder, which is not the run's."""
    delete = at(2, lambda: shutil.rmtree(RUN))
    code, printed = train("one source", RunPPO("one source", at_step=delete), "trainer.save_freq=2")
    assert code == 2 and printed.count("error: ") == 1 and "Traceback" not in printed, printed
    assert f"error: the run folder {RUN} was deleted or moved during the run" in printed
    assert "the last files of the run are in runs/bad.1" in printed
    ended = json.loads(Path("runs/bad.1/summary.json").read_text())
    assert ended["finished"] is False and "checkpoint" not in ended
    assert "the checkpoints, was deleted or moved" in ended["not_exported"]
    assert "was deleted or moved during the run" in ended["failed"]


def test_verls_trainer_ends_at_the_next_step_or_checkpoint(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "verl.yaml").touch()
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "verl.jsonl"))
    trainer = object.__new__(QaRLTrainerSync)
    trainer._check_run_folder()
    shutil.rmtree(folder)
    folder.mkdir()
    for write in (trainer.on_step_end, trainer._save_checkpoint):
        with pytest.raises(UserError, match="was deleted or moved during the run"):
            write()


def test_a_name_that_is_taken_is_refused(train):
    (RUN / "plots").mkdir(parents=True)
    (RUN / "plots" / "mine.png").touch()
    code, printed = train("one source", RunPPO("one source", at_step=fail(RuntimeError(BOOM))))
    assert code == 2 and f"error: {RUN / 'plots'} is in the way of the run" in printed


@pytest.mark.parametrize("broken", ["summarize", "plot_run", "write_report", "read_metrics"])
def test_an_error_of_the_words_hides_no_cause_and_keeps_no_export_from_being_written(
    train, monkeypatch, broken
):
    def fail_here(*arguments: Any) -> None:
        raise KeyError("a bug in the words")

    monkeypatch.setattr(f"qarl.trainer.finish.{broken}", fail_here)
    end = ENDS["an error after the last checkpoint"]
    code, printed = train("one source", RunPPO("one source", **end[0]()), "trainer.plots=true")
    assert code == 2 and "error: the reward failed" in printed and "Traceback" not in printed
    assert "error: KeyError: 'a bug in the words'" in printed
    assert (RUN / "export" / "model.safetensors").is_file()
    assert "the reward failed" in json.loads((RUN / "summary.json").read_text())["failed"]


def test_a_metric_that_is_no_number_stays_one_and_verls_names_of_all_sources_are_read(train):
    train("several sources", RunPPO("several sources"))
    entries = read_metrics(RUN)
    assert entries[1]["mismatch/k3"] != entries[1]["mismatch/k3"], "orjson writes NaN as null"
    others = {name: value for name, value in entries[0].items() if name.startswith("val-")}
    ours = {
        name: value
        for name, value in entries[0].items()
        if name.startswith("val/") and not name.endswith(("_low", "_high"))
    }
    assert {
        name: value for name, value in our_names(others).items() if name.startswith("val/")
    } == ours
    expected = expected_accuracies("several sources")
    assert ours["val/accuracy"] == pytest.approx(expected["accuracy_after"]) and len(ours) == len(
        expected
    )


VALUES = {
    "null": None,
    "NaN": float("nan"),
    "text": "nan",
    "infinite": "-Infinity",
    "words": "no number",
    "list": [1],
}


def test_values_of_verls_log():
    names = our_names(VALUES)
    assert list(names) == ["null", "NaN", "text", "infinite"]
    assert names.pop("infinite") == float("-inf") and all(
        value != value for value in names.values()
    )


def test_verls_own_figures_without_qarls_trainer():
    """Another number of answers for some prompts, an accuracy beside the reward, and a source named like a metric."""
    verls = {
        "val-core/a/acc/mean@4": 0.25, "val-aux/a/reward/mean@4": 9.0, "val-aux/a/acc/mean@1": 1.0,
        "val-core/b/acc/mean@1/reward/mean@1": 0.75, "val-core/a/acc/best@4/mean": 1.0,
    }  # fmt: skip
    ours = our_names(verls)
    assert (ours["val/accuracy/a"], ours["val/accuracy/b/acc/mean@1"], ours["val/accuracy"]) == (
        0.25,
        0.75,
        0.5,
    )


def test_each_response_of_an_evaluation_has_all_figures():
    trainer = object.__new__(QaRLTrainerSync)
    sources, uids = ["a", "a"], ["1", "2"]
    infos = {"reward": [1.0, 0.0], "pred": ["x", "y", "z"]}
    with pytest.raises(ValueError, match="longer"):
        trainer._val_metrics_update(sources, uids, infos, [2, 2])


def test_the_figure_of_a_response_is_its_accuracy_where_the_reward_returns_one():
    infos = {
        "reward": [5.0, 6.0, 7.0, 8.0],
        "acc": [True, None, None, 0.5],
        "pred": ["x", None, None, "y"],
    }
    assert answer_figures(["a", "a", "b", "a"], infos) == [1.0, 0.0, 7.0, 0.5]
    assert answer_figures(["a", "b"], {"reward": [5.0, 6.0]}) == [5.0, 6.0]
    assert answer_figures(["a", "b"], {"reward": [5.0, 6.0], "acc": ["right", "wrong"]}) == [
        5.0,
        6.0,
    ]
