"""The tiny model's tasks: answers worked out, scored by the configs' rewards, and apart from the warm start."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from qarl.config import load_config
from qarl.data.prompts import load_prompts
from qarl.data.rewards import get_reward_fn
from qarl.demo import tiny_model

NAMES = ("column_addition", "addition_chain", "letter_sorting")
LONG = NAMES[1:]


@pytest.fixture(scope="module")
def scripts() -> Any:
    return tiny_model


@pytest.mark.parametrize("name", NAMES)
def test_worked_answers_are_right_and_as_long_as_said(scripts: Any, name: str) -> None:
    task = scripts.TASKS[name]
    problems = task.draw(300, random.Random(0), set())
    assert len(set(problems)) == 300
    lengths = [len(task.response_text(problem)) + 1 for problem in problems]
    assert max(lengths) <= task.max_new_tokens
    assert name not in LONG or min(lengths) > 100
    for problem in problems:
        assert task.reward("", task.response_text(problem), task.answer(problem)) == 1.0
    assert task.draw(5, random.Random(0), set(problems[:3])) != problems[:5]


def test_a_chain_is_three_additions_in_columns(scripts: Any) -> None:
    module = scripts.TASKS["addition_chain"].module
    text = module.response_text((4831, 7294, 1022, 3345))
    totals = [int(word[1:]) for word in text.split() if word.startswith("=")]
    assert totals == [12125, 13147, 16492]
    for word in text.split():
        if not word.startswith("="):
            left, right = word.split("=")
            assert sum(map(int, left.split("+"))) == int(right)


def test_letters_are_inserted_one_by_one(scripts: Any) -> None:
    module = scripts.TASKS["letter_sorting"].module
    assert module.response_text("dkqba") == "d dk dkq bdkq abdkq"
    words = module.response_text("qwertyuiopasdf").split()
    assert [len(word) for word in words] == list(range(1, 15)) and words[-1] == "adefiopqrstuwy"
    score = module.last_word
    assert score("", "a ab", "ab") == 1.0
    assert [score("", text, "ab") for text in ("", "ab a", "a abc", "a a b")] == [0.0] * 4


@pytest.mark.parametrize("name", LONG)
def test_the_config_fits_the_task(scripts: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config, task = load_config([f"config={name}.yaml"]), scripts.TASKS[name]
    args = scripts.parse_arguments(["--task", name])
    assert str(args.output) == config.model.path
    assert [str(args.data / f"{split}.parquet") for split in ("train", "test")] == [
        *config.data.train_files,
        *config.data.val_files,
    ]
    assert get_reward_fn(config.reward.function).__name__ == task.reward.__name__
    problems = task.draw(200, random.Random(1), set())
    assert max(len(task.prompt_text(problem)) + 3 for problem in problems) <= config.data.max_prompt_length
    assert max(len(task.response_text(problem)) + 1 for problem in problems) <= config.data.max_response_length
    assert config.data.max_prompt_length + config.data.max_response_length <= 256


def test_a_model_for_another_task(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data are of that task, and the warm start never draws one of its problems."""
    seen: list[Any] = []
    make_batch = scripts.make_batch

    def watched(tokenizer: Any, problems: Any, task: Any) -> Any:
        seen.extend(problems)
        return make_batch(tokenizer, problems, task)

    monkeypatch.setattr(scripts, "make_batch", watched)
    task, excluded = scripts.TASKS["letter_sorting"], []
    draw = task.draw

    def noted(count: int, rng: random.Random, exclude: set[Any]) -> list[Any]:
        excluded.append(set(exclude))
        return draw(count, rng, exclude)

    monkeypatch.setitem(scripts.TASKS, "letter_sorting", scripts.Task(**{**vars(task), "draw": noted}))
    paths = tmp_path / "model", tmp_path / "data"
    words = ["--task", "letter_sorting", "--steps", "1", "--train-size", "6", "--test-size", "2"]
    assert scripts.main([*words, "--output", str(paths[0]), "--data", str(paths[1])]) == 0
    rows = load_prompts(str(paths[1] / "train.parquet"), tokenizer=scripts.make_tokenizer(), max_prompt_length=32)
    assert [len(row.messages[0]["content"]) for row in rows] == [14] * 6
    assert (
        rows[0].ground_truth == "".join(sorted(rows[0].messages[0]["content"]))
        and rows[0].data_source == "letter_sorting"
    )
    problems = {row.messages[0]["content"] for row in rows}
    assert len(seen) > 200 and problems.isdisjoint(seen) and all(problems < one for one in excluded[1:])
    assert json.loads((paths[0] / "made_with.json").read_text())["settings"]["task"] == "letter_sorting"
