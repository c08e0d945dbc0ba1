"""The tasks that a tiny model can be made for: problems, prompts, worked answers and rewards, one module each.

`column_addition` is the quickstart's. The other two have answers of more than 100 tokens, so that errors accumulate:
`addition_chain` is arithmetic, `letter_sorting` is not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from qarl.data.rewards import arithmetic
from qarl.demo import addition_chain, column_addition, letter_sorting

Problem = Any
"""A problem is hashable. Its type differs by task: two numbers, several numbers, a string."""


@dataclass(frozen=True)
class Task:
    """A task: its module, how to draw problems, their ground truth, and the reward function of its config.

    `max_new_tokens`: more than any right answer takes. `target`: greedy accuracy at which the warm start stops.
    `steps`: most steps of the warm start.
    """

    module: ModuleType
    draw: Callable[[int, random.Random, set[Problem]], list[Problem]]
    answer: Callable[[Problem], str]
    reward: Callable[..., float]
    max_new_tokens: int
    ability: str = "math"
    target: float = 0.40
    steps: int = 400

    @property
    def name(self) -> str:
        return str(self.module.DATA_SOURCE)

    @property
    def source(self) -> Path:
        return Path(str(self.module.__file__))

    def prompt_text(self, problem: Problem) -> str:
        return str(self.module.prompt_text(problem))

    def response_text(self, problem: Problem) -> str:
        return str(self.module.response_text(problem))

    def to_row(self, problem: Problem, split: str, index: int) -> dict[str, object]:
        """Return one row in verl's schema for rule-scored tasks."""
        return {
            "data_source": self.name,
            "prompt": [{"role": "user", "content": self.prompt_text(problem)}],
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": self.answer(problem)},
            "extra_info": {"split": split, "index": index},
        }


def _sum(pair: column_addition.OperandPair) -> str:
    return str(sum(pair))


TASKS = {
    task.name: task
    for task in (
        Task(column_addition, column_addition.draw_pairs, _sum, arithmetic, max_new_tokens=64),
        Task(
            addition_chain,
            addition_chain.draw,
            addition_chain.answer,
            arithmetic,
            max_new_tokens=176,
            target=0.25,
            steps=1000,
        ),
        Task(
            letter_sorting,
            letter_sorting.draw,
            letter_sorting.answer,
            letter_sorting.last_word,
            max_new_tokens=140,
            ability="sorting",
            target=0.08,  # the reward asks only for the last word, which is right far more often than all words
            steps=1000,
        ),
    )
}
