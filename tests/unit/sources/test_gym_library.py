"""Twenty tasks of the real reasoning-gym: data files hold its entries, and scores are its own.

The tests skip where `make smollm2` was not run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from smollm2 import skip_unless_installed

from benchmarks.proofs.gym_tasks import GYM_TASKS
from qarl.data.entry_text import from_text, to_text
from qarl.data.ground_truths import judge
from qarl.data.prompts import Prompt
from qarl.data.reasoning_gym_tasks import make_dataset
from qarl.data.rows import read_rows
from qarl.data.scoring import find_reward, score_rows
from qarl.sources.__main__ import main

ROWS = 12
VALIDATION = 4
SEED = 11
GARBLED = ("", " ", "x", "-1", "[[1", "{}", "null", "1/0", "1e999", "\x00é", "9" * 60)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_installed("reasoning_gym")
    monkeypatch.chdir(tmp_path)


def library_entries(task: str) -> dict[str, dict[str, Any]]:
    """Return the first entries of the library itself, by question."""
    parameters = dict(word.split("=") for word in GYM_TASKS[task])
    random.seed(SEED)
    numpy.random.seed(SEED)
    dataset = make_dataset(task, parameters, seed=SEED, size=1000)
    entries = [dataset[index] for index in range(6 * ROWS)]
    return {entry["question"]: entry for entry in reversed(entries)}


def write(task: str, *words: str) -> None:
    sizes = (f"size={ROWS - VALIDATION}", f"validation={VALIDATION}", f"seed={SEED}")
    assert main(["reasoning_gym", f"task={task}", *sizes, *GYM_TASKS[task], *words]) == 0


def rows_of(task: str, ending: str) -> list[Any]:
    files = (f"data/{task}/validation.{ending}", f"data/{task}/train.{ending}")
    return [row for file in files for row in read_rows(file)]


def own_scores(dataset: Any, answers: Sequence[str], entry: dict[str, Any]) -> list[float]:
    scores = []
    for answer in answers:
        try:
            scores.append(float(dataset.score_answer(answer.strip(), entry)))
        except Exception:  # where the library raises, the reward is 0
            scores.append(0.0)
    return scores


@pytest.mark.long
@pytest.mark.parametrize("task", GYM_TASKS)
def test_files_hold_the_librarys_entries_and_scores_are_its_own(task: str) -> None:
    write(task)
    write(task, "format=jsonl", "out=lines")
    rows = rows_of(task, "parquet")
    lines = [row for name in ("validation", "train") for row in read_rows(f"lines/{name}.jsonl")]
    assert rows == lines
    assert len({row["prompt"][0]["content"] for row in rows}) == ROWS
    library = library_entries(task)
    dataset = make_dataset(task, dict(word.split("=") for word in GYM_TASKS[task]))
    calls = []
    expected = []
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        entry = library[row["prompt"][0]["content"]]
        assert row["extra_info"]["entry"] == to_text(entry)
        assert to_text(from_text(row["extra_info"]["entry"])) == to_text(entry)
        truths = [entry["answer"], from_text(other["extra_info"]["entry"])["answer"]]
        answers = [*filter(None, truths), *GARBLED]
        expected += own_scores(dataset, answers, entry)
        calls += [call(row, answer) for answer in answers]
    reward = find_reward("reasoning_gym", 1)
    try:
        scores = score_rows(reward, calls, [""] * len(calls), timeout_s=60)
        assert scores == expected
        assert max(scores) > 0 or rows[0]["reward_model"]["ground_truth"] == {"answer": ""}
        assert judge(reward, [prompt(row) for row in rows], timeout_s=60).wrong == []
    finally:
        reward.stop()


def call(row: Any, response: str) -> dict[str, Any]:
    return {
        "data_source": row["data_source"],
        "solution_str": response,
        "ground_truth": row["reward_model"]["ground_truth"],
        "extra_info": row["extra_info"],
    }


def prompt(row: Any) -> Prompt:
    truth = row["reward_model"]["ground_truth"]
    return Prompt(0, row["data_source"], [], [], truth, row["extra_info"])


def test_a_mixture_has_the_data_source_of_each_part() -> None:
    parts = "[{name: chain_sum, weight: 1, config: {}}, {name: gcd, weight: 1, config: {}}]"
    words = ("size=30", "validation=0", f"datasets={parts}")
    assert main(["reasoning_gym", "task=composite", *words]) == 0
    rows = read_rows("data/composite/train.parquet")
    sources = {row["data_source"] for row in rows}
    assert sources == {"reasoning_gym/chain_sum", "reasoning_gym/gcd"}
    reward = find_reward("reasoning_gym", 1)
    try:
        calls = [call(row, row["reward_model"]["ground_truth"]) for row in rows]
        assert score_rows(reward, calls, [""] * len(calls), timeout_s=60) == [1.0] * 30
    finally:
        reward.stop()
