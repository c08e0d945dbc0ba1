"""The tasks that a tiny model can be made for: problems, prompts, worked answers and rewards.

Answers take one token for each character, end-of-text included. A half-trained model slips now and then in any step,
and one slip spoils the answer: that is what reinforcement learning can then remove.

`column_addition` is the quickstart's: two numbers of 4 or 5 digits. The answer adds column by column from the right,
`a+b+carry=ct` with c the new carry and t the digit, and closes with the sum; only that last number is scored. An answer
takes 42 to 53 tokens:

    prompt    48310+7294
    response  0+4+0=04 1+9+0=10 3+2+1=06 8+7+0=15 4+0+1=05 =55604

`addition_chain` adds four numbers of four digits one after the other, each addition in such columns. A wrong digit in a
running sum is carried through all later additions. An answer takes 126 to 147 tokens:

    prompt    4831+7294+1022+3345
    response  1+4+0=05 3+9+0=12 8+2+1=11 4+7+1=12 =12125 5+2+0=07 ... =13147 7+5+0=12 ... =16492

`letter_sorting` has no numbers: 14 different letters. The answer inserts them one by one and writes the sorted letters
after each; only the last word is scored. An answer takes 119 tokens. With five letters:

    prompt    dkqba
    response  d dk dkq bdkq abdkq

`calculator` takes several turns, with the calculator of `qarl.demo.calculator`: two products of two numbers of three
digits, and their sum. The model copies and the calculator calculates. A conversation takes 4 turns and 3 results:

    prompt    384*571+926*108
    response  384*571 -> 219264   926*108 -> 100008   219264+100008 -> 319272   =319272
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from qarl.data.rewards import arithmetic, environment
from qarl.demo import calculator
from qarl.errors import UserError

Problem = Any
"""A problem is hashable: a tuple of numbers, or a string of letters."""


def add_in_columns(a: int, b: int) -> str:
    columns = []
    carry = 0
    digits_of_a = reversed(str(a))
    digits_of_b = reversed(str(b))
    for x, y in zip_longest(digits_of_a, digits_of_b, fillvalue="0"):
        total = int(x) + int(y) + carry
        columns.append(f"{x}+{y}+{carry}={total:02d}")
        carry = total // 10
    return f"{' '.join(columns)} ={a + b}"


def add_one_by_one(numbers: tuple[int, ...]) -> str:
    sums = [sum(numbers[:count]) for count in range(1, len(numbers))]
    additions = map(add_in_columns, sums, numbers[1:])
    return " ".join(additions)


def insert_one_by_one(letters: str) -> str:
    words = []
    for count in range(1, len(letters) + 1):
        inserted = sorted(letters[:count])
        words.append("".join(inserted))
    return " ".join(words)


def products(problem: tuple[int, ...]) -> tuple[int, int]:
    a, b, c, d = problem
    return a * b, c * d


def call_by_call(problem: tuple[int, ...]) -> list[str]:
    """Return the turns that calculate two products and their sum with the calculator."""
    a, b, c, d = problem
    left, right = products(problem)
    return [f"{a}*{b}", f"{c}*{d}", f"{left}+{right}", f"={left + right}"]


def last_word(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1.0 if the last word of the response is `ground_truth`, else 0.0."""
    return float(solution_str.split()[-1:] == [ground_truth])


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1), 10**digits)


def _pair(rng: random.Random) -> tuple[int, ...]:
    lengths = [rng.choice((4, 5)) for _ in range(2)]
    return tuple(_number(rng, digits) for digits in lengths)


def _written_sum(numbers: tuple[int, ...]) -> str:
    return "+".join(map(str, numbers))


@dataclass(frozen=True)
class Task:
    """A task: how to draw one problem, its prompt, its worked answer, its ground truth, and its config's reward.

    `target`: greedy accuracy at which the warm start stops. `steps`: most steps of the warm start.
    """

    name: str
    draw_one: Callable[[random.Random], Problem]
    prompt_text: Callable[[Problem], str]
    response_text: Callable[[Problem], str]
    answer: Callable[[Problem], str]
    reward: Callable[..., float]
    target: float
    steps: int
    environment: Callable[..., Any] | None = None
    """What answers the model's turns, for a task of several (`qarl.turns.reply`)."""
    worked_turns: Callable[[Problem], list[str]] | None = None
    """The turns of a worked answer, which ends with `response_text`."""

    def turns(self, problem: Problem) -> list[str]:
        """Return the turns of the worked answer."""
        return self.worked_turns(problem) if self.worked_turns else [self.response_text(problem)]

    def draw(self, count: int, rng: random.Random, exclude: set[Problem]) -> list[Problem]:
        """Return `count` distinct problems. None of them is in `exclude`, and no sum is there in the other order.

        Raise UserError if the task does not seem to have so many."""
        problems: dict[Problem, None] = {}
        for attempt in itertools.count():
            if len(problems) == count:
                break
            if attempt > 100 * (count + len(exclude)):
                raise UserError(
                    f"the task {self.name} has too few different problems",
                    why=f"{attempt} draws gave {len(problems)} new ones beside {len(exclude)}; {count} are needed",
                    fix="let draw return more different problems, or ask for fewer rows: train_size=N test_size=N",
                )
            problem = self.draw_one(rng)
            turned = problem[::-1] if self.name == "column_addition" else problem
            if exclude.isdisjoint({problem, turned}) and turned not in problems:
                problems[problem] = None
        return list(problems)

    def to_row(self, problem: Problem, split: str, index: int) -> dict[str, object]:
        """Return one row in verl's schema for rule-scored tasks."""
        return {
            "data_source": self.name,
            "prompt": [{"role": "user", "content": self.prompt_text(problem)}],
            "ability": "sorting" if self.name == "letter_sorting" else "math",
            "reward_model": {"style": "rule", "ground_truth": self.answer(problem)},
            "extra_info": {"split": split, "index": index},
        }


TASKS = {
    task.name: task
    for task in (
        Task(
            "column_addition",
            _pair,
            _written_sum,
            lambda pair: add_in_columns(*pair),
            lambda pair: str(sum(pair)),
            arithmetic,
            target=0.40,
            steps=400,
        ),
        Task(
            "addition_chain",
            lambda rng: tuple(_number(rng, 4) for _ in range(4)),
            _written_sum,
            add_one_by_one,
            lambda numbers: str(sum(numbers)),
            arithmetic,
            target=0.25,
            steps=1000,
        ),
        Task(
            "letter_sorting",
            lambda rng: "".join(rng.sample(string.ascii_lowercase, 14)),
            str,
            insert_one_by_one,
            lambda letters: "".join(sorted(letters)),
            last_word,
            target=0.08,  # the reward asks only for the last word, which is right far more often than all words
            steps=1000,
        ),
        Task(
            "calculator",
            lambda rng: tuple(_number(rng, 3) for _ in range(4)),
            lambda problem: "{}*{}+{}*{}".format(*problem),
            lambda problem: f"={sum(products(problem))}",
            lambda problem: str(sum(products(problem))),
            environment,
            target=0.15,
            steps=1000,
            environment=calculator.answer,
            worked_turns=call_by_call,
        ),
    )
}
