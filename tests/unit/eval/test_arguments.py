"""What `qarl eval` refuses before it loads anything: data files and a config.json that are not as they should be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from config_problems import MINIMAL

from qarl.config import load_config, write_resolved
from qarl.config.errors import ConfigError
from qarl.errors import UserError
from qarl.eval import evaluate
from qarl.eval.arguments import EvalRequest, check_files, settings_of

RUN = Path("moved/best")


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose folder was moved, and a model folder; the commands start elsewhere than the run."""
    monkeypatch.chdir(tmp_path)
    for folder in (RUN, Path("model")):
        folder.mkdir(parents=True)
    (RUN / "config.yaml").write_text(MINIMAL)
    Path("minimal.yaml").write_text(MINIMAL)
    Path("model/config.json").write_text("{}")
    Path("here.jsonl").touch()


def refusal(request: EvalRequest) -> UserError:
    with pytest.raises(UserError) as error:
        check_files(request, settings_of(request))
    return error.value


def test_the_files_of_a_run_count_from_where_it_was_started(tmp_path: Path) -> None:
    error = refusal(EvalRequest(RUN))
    assert error.what == "no such data file: test.parquet"
    assert error.where == "data.val_files of the run moved/best"
    assert error.why == f"looked in {tmp_path}"
    assert "the folder in which the run was started" in str(error.fix)
    assert "files=A,B" in str(error.fix)
    assert settings_of(EvalRequest(RUN, files="here.jsonl")).files == ("here.jsonl",)


def test_files_of_the_command_line() -> None:
    error = refusal(EvalRequest(Path("model"), files="here.jsonl,nowhere.jsonl"))
    assert (error.what, error.where) == ("no such data file: nowhere.jsonl", "files")
    assert refusal(EvalRequest(RUN, files="model")).why == "it is a folder"


@pytest.mark.parametrize(
    "text", ["here.jsonl,b.jsonl", "[here.jsonl, b.jsonl]", " here.jsonl, b.jsonl"]
)
def test_files_may_be_written_as_a_list_of_the_config(text: str) -> None:
    Path("b.jsonl").touch()
    assert settings_of(EvalRequest(Path("model"), files=text)).files == ("here.jsonl", "b.jsonl")


def test_against_a_run_or_nothing_is_refused_before_the_first_model_is_scored() -> None:
    def against(folder: str) -> UserError:
        return refusal(EvalRequest(Path("model"), files="here.jsonl", against=folder))

    error = against(str(RUN))
    assert error.what == f"against={RUN} is no model folder"
    assert error.why == "it is the folder of a run"
    assert "qarl export run=moved/best" in str(error.fix)
    (RUN / "export").mkdir()
    (RUN / "export" / "config.json").write_text("{}")
    assert against(str(RUN)).fix == "write against=moved/best/export"
    assert against("nowhere").why == "there is no such folder"
    assert against("moved").why == "it has no config.json"
    right = EvalRequest(Path("model"), files="here.jsonl", against="moved/best/export")
    check_files(right, settings_of(right))


@pytest.mark.parametrize("text", ["{", "[1]", "\x80"])
def test_a_damaged_config_of_the_model(text: str) -> None:
    Path("model/config.json").write_text(text, encoding="latin-1")
    error = refusal(EvalRequest(Path("model"), files="here.jsonl"))
    assert error.what == "model/config.json cannot be read"
    assert str(error.why).startswith("it is no JSON object")


@pytest.mark.parametrize(
    ("model", "limit", "given", "refused"),
    [
        (RUN, None, 31, False),
        (RUN, None, 32, True),
        (RUN, 4, None, True),  # the run's 4
        (RUN, 5, None, False),
        (Path("model"), 3, 3, True),
    ],
)
def test_responses_that_could_not_end_are_refused_as_in_a_run(
    model: Path, limit: int | None, given: int | None, refused: bool
) -> None:
    config = MINIMAL.replace("rollout:\n", "rollout:\n  min_tokens: 4\n")
    (RUN / "config.yaml").write_text(config)
    request = EvalRequest(model, files="here.jsonl", max_response_length=limit, min_tokens=given)
    if not refused:
        settings_of(request)
        return
    error = refusal(request)
    assert error.where == "min_tokens, max_response_length"
    assert "leaves no response an end" in error.what


@pytest.mark.parametrize("folder", [RUN / "checkpoints" / "step_3", RUN / "checkpoints"])
def test_a_checkpoint_in_place_of_its_run_is_named_with_its_step(folder: Path) -> None:
    model = RUN / "checkpoints" / "step_3"
    model.mkdir(parents=True)
    for file in ("config.json", "state.json"):
        (model / file).write_text("{}")
    error = refusal(EvalRequest(folder))
    assert error.what == f"{folder} is in the folder of a run, and is not a run"
    assert error.fix == f"write qarl eval {RUN} step=3"
    if folder == model:
        assert settings_of(EvalRequest(model, files="here.jsonl")).files == ("here.jsonl",)


def test_plugins_and_the_environment_that_were_moved_can_be_named() -> None:
    """As the errors about their old places say."""
    moved = "rollout:\n  environment: old.py:answer\n"
    (RUN / "config.yaml").write_text(
        f"plugins: [gone.py]\n{MINIMAL.replace('rollout:' + chr(10), moved)}"
    )
    assert refusal(EvalRequest(RUN, files="here.jsonl")).where == "plugins"
    Path("new.py").touch()
    request = EvalRequest(RUN, files="here.jsonl", plugins="new.py", environment="new.py:answer")
    config = settings_of(request).config
    assert config is not None
    assert config.plugins == ["new.py"]
    assert config.rollout.environment == "new.py:answer"
    of_model = EvalRequest(Path("model"), files="here.jsonl", plugins="new.py")
    assert "give runs/NAME" in str(refusal(of_model).fix)


@pytest.mark.parametrize("left", [False, True], ids=["gone", "changed"])
def test_a_run_is_scored_without_the_adapter_that_it_began_from(left: bool) -> None:
    start = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    Path("start").mkdir()
    file = Path("start/adapter_config.json")
    file.write_text(json.dumps(start))
    run = load_config(["config=minimal.yaml", "lora.path=start"])
    write_resolved(run, RUN / "config.yaml")
    file.write_text(json.dumps(start | {"r": 4})) if left else shutil.rmtree("start")
    config = settings_of(EvalRequest(RUN, files="here.jsonl")).config
    assert config is not None
    assert config.lora == run.lora.model_copy(update={"path": None})
    with pytest.raises(ConfigError) as error:
        load_config([f"config={RUN}/config.yaml"])
    assert "lora.path=null" in error.value.problems[0].fix
    resumed = load_config([f"config={RUN}/config.yaml", "lora.path=null"])
    assert resumed.lora == config.lora


@pytest.mark.parametrize("fix", [None, "correct it"])
def test_the_advice_to_name_a_function_leaves_the_error_as_it_is(
    fix: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfAKind(UserError):
        pass

    def fail(*_: object) -> str:
        raise OfAKind("no function", where="reward.function=old.py:f", fix=fix)

    monkeypatch.setattr(evaluate, "_evaluated", fail)
    request = EvalRequest(RUN, files="here.jsonl")
    with pytest.raises(OfAKind) as error:
        evaluate.evaluate(request, settings_of(request))
    advice = "name the function where it is now: reward=NAME"
    assert error.value.fix == (f"{fix}; or {advice}" if fix else advice)
    assert str(error.value).endswith(f"fix: {error.value.fix}")
