"""What a config names besides keys is found by a dry run and by the doctor, with the words of a start: functions of the
user, and variables of the chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from qarl.doctor.__main__ import main as doctor
from qarl.train import main

pytestmark = pytest.mark.usefixtures("startable_run")
FUNCTIONS = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def answer(messages, **others):
    return None
"""
TURNS = "reward.function=environment"
FAULTS = {
    "a module of the environment": (
        ["rollout.environment=nomodule:answer", TURNS],
        ["cannot load nomodule", "where: rollout.environment", "No module named 'nomodule'"],
    ),
    "a function of the environment": (
        ["rollout.environment=mine.py:answers", TURNS],
        ["mine.py has no function 'answers'", "its functions: score, answer"],
    ),
    "a file of the reward": (
        ["reward.function=gone.py:score"],
        ["cannot load gone.py", "where: reward.function"],
    ),
    "one of several rewards": (
        ["reward.functions=[{function: arithmetic}, {function: mine.py:scores}]"],
        ["mine.py has no function 'scores'", "where: reward.functions=mine.py:scores"],
    ),
    "a variable of the template": (
        ["data.apply_chat_template_kwargs={enable_thinkng: false}"],
        ["the chat template does not use enable_thinkng", "data.apply_chat_template_kwargs"],
    ),
}


@pytest.fixture(autouse=True)
def _functions(startable_run: Path) -> None:
    Path("mine.py").write_text(FUNCTIONS)


@pytest.mark.parametrize(("arguments", "parts"), FAULTS.values(), ids=FAULTS)
def test_a_dry_run_a_start_and_the_doctor_find_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    said = {}
    for extra in ("dry_run=true", "dry_run=false"):
        assert main(["config=run.yaml", *arguments, extra]) == 2
        said[extra] = capsys.readouterr().err
    assert doctor(["config=run.yaml", *arguments]) == 1
    said["doctor"] = " ".join(capsys.readouterr().out.split())
    for who, text in said.items():
        assert [part for part in parts if part not in text] == [], (who, text)


def test_the_doctor_finds_a_variable_where_no_data_are(capsys: pytest.CaptureFixture[str]) -> None:
    for file in Path().glob("*.jsonl"):
        file.unlink()
    variables = "data.apply_chat_template_kwargs={enable_thinkng: false}"
    assert doctor(["config=run.yaml", variables, "doctor.device=h100"]) == 1
    assert "the chat template does not use enable_thinkng" in capsys.readouterr().out


def test_functions_that_can_be_loaded_are_no_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Both at once, and the built-in ones without their packages."""
    both = ["reward.function=mine.py:score", "rollout.environment=mine.py:answer"]
    assert main(["config=run.yaml", *both, "dry_run=true"]) == 0
    assert main(["config=run.yaml", "reward.function=reasoning_gym", "dry_run=true"]) == 0
    assert "error" not in capsys.readouterr().err


def test_a_dry_run_names_all_that_cannot_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["reward.function=gone.py:score", "rollout.environment=nomodule:answer"]
    assert main(["config=run.yaml", *names, "dry_run=true"]) == 2
    text = capsys.readouterr().err
    assert "cannot load gone.py" in text and "cannot load nomodule" in text
