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
from qarl.demo import calculator, tiny_model
from qarl.demo.worked import worked

NAMES = ("column_addition", "addition_chain", "letter_sorting")
LONG = NAMES[1:]
CALCULATOR = tiny_model.TASKS["calculator"]


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


def test_the_calculator_by_hand() -> None:
    problem = (384, 571, 926, 108)
    assert CALCULATOR.prompt_text(problem) == "384*571+926*108"
    turns = CALCULATOR.turns(problem)
    assert turns == ["384*571", "926*108", "219264+100008", "=319272"]
    results = [calculator.calculated(turn) for turn in turns[:3]]
    assert results == ["219264", "100008", "319272"]
    assert [calculator.calculated(text) for text in ("3-12", "3/4", "1+2+3", "", "__import__('os')")] == [
        "-9", "?", "?", "?", "?",
    ]  # fmt: skip


def test_worked_conversations_earn_the_reward_and_fit_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(["config=calculator.yaml"])
    problems = CALCULATOR.draw(200, random.Random(1), set())
    conversations = worked(tiny_model.make_tokenizer(), CALCULATOR, problems)
    for problem, conversation in zip(problems, conversations, strict=True):
        assert conversation.rewards == [1.0]
        assert conversation.messages[-1]["content"] == CALCULATOR.response_text(problem)
        assert len(conversation.turns) == 4 <= config.multi_turn.max_assistant_turns
    longest = max(len(each.response_token_ids) for each in conversations)
    room = 2 * longest // 4  # for two wrong calls
    assert longest + room <= config.data.max_response_length
    assert (
        max(len(each.prompt_token_ids) for each in conversations) <= config.data.max_prompt_length
    )
    recipe = tiny_model.Recipe.of(CALCULATOR)
    assert str(recipe.output) == config.model.path
    assert config.reward.function == "environment"
    assert config.rollout.environment == f"{calculator.answer.__module__}:answer"


def test_labels_are_the_models_turns() -> None:
    tokenizer = tiny_model.make_tokenizer()
    (problem,) = CALCULATOR.draw(1, random.Random(3), set())
    tokens, labels = tiny_model.make_batch(tokenizer, [problem], CALCULATOR)
    taught = tokenizer.decode(labels[0][labels[0] != tiny_model.IGNORE_INDEX])
    assert taught == "".join(f"{turn}<|eos|>" for turn in CALCULATOR.turns(problem))
    read = tokenizer.decode(tokens[0])
    results = [calculator.calculated(turn) for turn in CALCULATOR.turns(problem)[:3]]
    assert [part.split("<|assistant|>")[0] for part in read.split("<|user|>")[2:]] == results
