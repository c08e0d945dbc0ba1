"""The record of what a run reads: both backends write the same, all parts are compared, and errors name a cause."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from bad_runs import edit_model_config
from interrupted_runs import BACKENDS, interrupted, record, resumed, run_config, template

from qarl.checks.check import RunInputs
from qarl.checks.inputs_record import config_keys, reference_digest
from qarl.checks.registry import CHECKS
from qarl.data.rewards import scorer_version
from qarl.errors import UserError
from qarl.metrics.tracker import write_versions
from qarl.train import _errors
from qarl.trainer.input_changes import _PARTS, NOT_RECORDED, changes_of

DATED = "{% for m in messages %}{{ m['content'] }} {% endfor %}{{ strftime_now('t%d') }}"


def test_every_part_of_a_record_is_compared(run_folder: Path) -> None:
    """And every key of the model's config that is left out decides nothing."""
    inputs = RunInputs(run_config("local"))
    assert set(inputs.record) == {*_PARTS, "transformers"}
    left_out = inputs.hf_config.to_dict().keys() - {
        key.partition(".")[0] for key in config_keys(inputs.hf_config)
    }
    assert left_out == {
        *(
            "_name_or_path",
            "attention_dropout",
            "bos_token_id",
            "chunk_size_feed_forward",
            "dtype",
            "eos_token_id",
        ),
        *(
            "id2label",
            "initializer_range",
            "is_encoder_decoder",
            "label2id",
            "output_attentions",
            "pad_token_id",
        ),
        *(
            "output_hidden_states",
            "problem_type",
            "return_dict",
            "transformers_version",
            "use_cache",
        ),
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_backends_record_the_same(run_folder: Path, backend: str) -> None:
    assert record(run_config(backend)) == record(run_config("local"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_without_a_record_resumes_with_a_note(
    run_folder: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(backend)
    interrupted(config, None)
    assert NOT_RECORDED in resumed(config, capsys)
    moved = run_config(backend, "data.train_files=val.jsonl")
    with pytest.raises(UserError, match="the config changes what is trained") as caught:
        resumed(moved, capsys)
    assert "data.train_files" in str(caught.value)


@pytest.mark.parametrize("key", ["trainer.n_gpus_per_node", "trainer.nnodes"])
def test_another_number_of_ranks_is_refused_with_its_reason(
    run_folder: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config("verl")
    interrupted(config, record(config))
    with pytest.raises(UserError, match="another number of ranks") as caught:
        resumed(run_config("verl", f"{key}=2"), capsys)
    assert f"{key} was 1, now 2" in str(caught.value) and "each rank has its own part" in str(
        caught.value
    )


class On:
    """A `datetime` whose now is a day."""

    def __init__(self, day: int) -> None:
        self.day = day

    def now(self) -> datetime:
        return datetime(2026, 11, self.day)


@pytest.fixture
def set_day(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the day of November 2026 that QaRL and transformers take for today."""
    from transformers.utils import chat_template_utils

    from qarl.data import dated_template

    def on(day: int) -> None:
        monkeypatch.setattr(chat_template_utils, "datetime", On(day))
        monkeypatch.setattr(dated_template, "datetime", On(day))

    return on


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_template_with_todays_date_is_named_and_can_be_mended(
    run_folder: Path,
    backend: str,
    set_day: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    template(DATED)
    set_day(28)
    config = run_config(backend)
    interrupted(config, record(config))
    assert resumed(config, capsys) == "", "on the same day"
    set_day(29)
    with pytest.raises(UserError, match="what it reads has changed") as caught:
        resumed(config, capsys)
    said = str(caught.value)
    for words in (
        "differ because the chat template writes the date, which was t28, now t29",
        "resume_mode=disable",
    ):
        assert words in said
    assert (
        'replace strftime_now("t%d") by "t28" in the chat template of the model\'s folder' in said
    )
    template(DATED.replace("strftime_now('t%d')", "'t28'"))
    assert "chat template has changed" in resumed(config, capsys)


def test_a_template_with_todays_date_is_named_at_the_start(
    run_folder: Path, set_day: Callable[[int], None]
) -> None:
    """And one that only mentions the date, in a branch for tools, is not."""
    check = next(check for check in CHECKS if check.name == "the prompts are the same every day")
    template(DATED)
    set_day(28)
    (finding,) = check.findings(RunInputs(run_config("local")))
    assert finding.status == "warning" and "today's date into the prompts (t28)" in finding.what
    assert 'replace strftime_now("t%d") by "t28"' in (finding.fix or "")
    template(
        "{% if tools %}{{ strftime_now('%d') }}{% endif %}{% for m in messages %}{{ m['content'] }} {% endfor %}"
    )
    assert list(check.findings(RunInputs(run_config("local")))) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dry_run_refuses_what_the_run_would_refuse(
    run_folder: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(backend)
    interrupted(config, record(config))
    edit_model_config(rms_norm_eps=1e-2)
    (error,) = [error for error in _errors(run_config(backend)) if "cannot resume" in error.what]
    assert "rms_norm_eps" in (error.where or "")


def test_other_threads_of_the_environment_are_noted_in_verl(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The local backend says so in its log."""
    config = run_config("verl")
    interrupted(config, record(config))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_versions(config.run_dir)
    assert resumed(config, capsys) == ""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "bits may differ: threads" in resumed(config, capsys)


def test_another_transformers_is_named_beside_what_it_changes(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone it is no change. A key that only one of two versions knows is a note, and another value is refused."""
    config = run_config("local")
    saved = record(config) | {"transformers": "5.0.0"}
    saved["model"] = {
        key: value for key, value in saved["model"].items() if key != "attention_bias"
    }
    interrupted(config, saved)
    note = resumed(config, capsys)
    assert f"only one of transformers 5.0.0 and {version('transformers')} has this key" in note
    edit_model_config(rms_norm_eps=1e-2)
    with pytest.raises(UserError, match=f"transformers was 5.0.0, now {version('transformers')}"):
        resumed(run_config("local"), capsys)


@pytest.mark.parametrize(
    ("before", "now", "refused"), [("a", "b", True), ("a", "a", None), (None, "b", False)]
)
def test_a_reference_from_the_hub_is_compared_by_its_commit(
    run_folder: Path, before: str | None, now: str, refused: bool | None
) -> None:
    """None: the Hub's cache did not know the commit."""
    saved = record(run_config("local"))
    reads = [
        saved | {"reference": reference_digest([], SimpleNamespace(_commit_hash=commit))}
        for commit in (before, now)
    ]
    assert [change.refused for change in changes_of(*reads)] == (
        [] if refused is None else [refused]
    )


def test_another_version_of_the_package_that_scores_is_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of QaRL's own rewards, two are those of a package: its version says what a score means."""
    versions = {"math-verify": "0.8.0", "reasoning-gym": "0.1.24"}
    needed: list[str] = []
    monkeypatch.setattr(
        "qarl.data.rewards.require", lambda *modules, needed_for: needed.append(needed_for)
    )
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    assert scorer_version("reasoning_gym", "reward.functions") == "reasoning-gym 0.1.24"
    assert needed == ["reward.functions=reasoning_gym"], "the key that names it"
    key = "reward.function"
    assert scorer_version("math_verify", key) == "math-verify 0.8.0"
    assert (
        scorer_version("arithmetic", key) is None and scorer_version("mine.py:score", key) is None
    )
    before = {"scorer": "reasoning-gym 0.1.24"}
    (change,) = changes_of(before, {"scorer": "reasoning-gym 0.1.25"})
    assert not change.refused
    assert "those of reasoning-gym 0.1.24, now of reasoning-gym 0.1.25" in change.what
    assert not list(changes_of(before, before)) and not list(changes_of({}, before))
    assert not list(changes_of({"scorer": None}, before)), "another function is told by its key"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resume_with_another_version_of_math_verify_says_so(
    run_folder: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(backend, "reward.function=math_verify")
    written = record(config)
    assert written["scorer"] == f"math-verify {version('math-verify')}"
    interrupted(config, written | {"scorer": "math-verify 0.0.1"})
    assert "the rewards were those of math-verify 0.0.1, now of" in resumed(config, capsys)
