"""The tiny model's tasks: answers worked out, scored by the configs' rewards, and apart from the warm start."""

from __future__ import annotations

import random

import pytest
from checkout import ROOT

from qarl.config import load_config
from qarl.data.ground_truths import judge
from qarl.data.prompts import Prompt
from qarl.data.reward_workers import InProcessReward
from qarl.data.rewards import get_reward_fn
from qarl.demo import tiny_model

NAMES = ("column_addition", "addition_chain", "letter_sorting")
LONG = NAMES[1:]


@pytest.mark.parametrize("name", NAMES)
def test_worked_answers_are_right_and_as_long_as_said(name: str) -> None:
    task = tiny_model.TASKS[name]
    problems = task.draw(300, random.Random(0), set())
    assert len(set(problems)) == 300
    lengths = [len(task.response_text(problem)) + 1 for problem in problems]
    assert name not in LONG or min(lengths) > 100
    for problem in problems:
        assert task.reward("", task.response_text(problem), task.answer(problem)) == 1.0
    assert task.draw(5, random.Random(0), set(problems[:3])) != problems[:5]


@pytest.mark.parametrize("name", NAMES)
def test_ground_truths_are_right_answers(name: str) -> None:
    """So that a run of a shipped config starts without an error or a warning."""
    task = tiny_model.TASKS[name]
    problems = task.draw(64, random.Random(0), set())
    prompts = [Prompt(i, name, [], [1], task.answer(problem)) for i, problem in enumerate(problems)]
    judged = judge(InProcessReward(name, task.reward), prompts, timeout_s=None)
    assert (judged.count, judged.wrong) == (64, [])


def test_letters_are_inserted_one_by_one() -> None:
    module = tiny_model.TASKS["letter_sorting"]
    assert module.response_text("dkqba") == "d dk dkq bdkq abdkq"
    score = module.reward
    assert score("", "a ab", "ab") == 1.0
    assert [score("", text, "ab") for text in ("", "ab a", "a abc", "a a b")] == [0.0] * 4


@pytest.mark.parametrize("name", LONG)
def test_the_config_fits_the_task(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config, task = load_config([f"config={name}.yaml"]), tiny_model.TASKS[name]
    recipe = tiny_model.Recipe.of(task)
    assert str(recipe.output) == config.model.path
    assert [str(recipe.data / f"{split}.parquet") for split in ("train", "test")] == [
        *config.data.train_files,
        *config.data.val_files,
    ]
    assert get_reward_fn(config.reward.function).__name__ == task.reward.__name__
    problems = task.draw(200, random.Random(1), set())
    assert (
        max(len(task.prompt_text(problem)) + 3 for problem in problems)
        <= config.data.max_prompt_length
    )
    assert (
        max(len(task.response_text(problem)) + 1 for problem in problems)
        <= config.data.max_response_length
    )
    assert config.data.max_prompt_length + config.data.max_response_length <= 256
