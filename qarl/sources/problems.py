"""Problems of a source, and how they become the rows of two data files with distinct prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from qarl.errors import UserError
from qarl.progress import live

Message = dict[str, str]
VALIDATION = "validation"
TRAIN = "train"
PATIENCE = 1000
"""Problems in a row without a new question after which a source counts as exhausted, beside ten for each that was
found. With 100 equally likely questions the last one is missed with a probability of about 1e-9."""
PER_FOUND = 10


@dataclass(frozen=True)
class Problem:
    """A problem. `answer`: the right answer, or None if a scorer decides without one. `extra_info`: what the scorer
    needs; plain values that a table holds."""

    data_source: str
    question: str
    answer: str | None
    extra_info: Mapping[str, Any]


@dataclass(frozen=True)
class Stream:
    """What a source gives. `name`: of the problems, such as the task; `reward`: the value of `reward.function`.

    `settings`: everything that decides the problems, for the record beside the files."""

    name: str
    reward: str
    problems: Iterator[Problem]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Wording:
    """How a question becomes a prompt. `system`: text of a system message. `instruction`: text below the question."""

    system: str = ""
    instruction: str = ""

    def messages(self, question: str) -> list[Message]:
        content = f"{question}\n{self.instruction}" if self.instruction else question
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": content}]


def distinct(problems: Iterator[Problem]) -> Iterator[Problem]:
    """Yield the problems whose question, without spaces around it, has not come before.

    End when the source gives no new question for long (`PATIENCE`), or ends itself."""
    seen: set[str] = set()
    repeated = 0
    for problem in problems:
        question = problem.question.strip()
        if question not in seen:
            seen.add(question)
            repeated = 0
            live.advance()
            yield problem
            continue
        repeated += 1
        if repeated > PATIENCE + PER_FOUND * len(seen):
            return


def split(stream: Stream, *, train: int, validation: int) -> dict[str, list[Problem]]:
    """Return `validation` problems and then `train` ones, all with different questions.

    The validation problems come first, so they stay the same if only the number of training problems changes. Raise
    UserError, with the number found, if there are too few."""
    needed = train + validation
    found = list(islice(distinct(stream.problems), needed))
    if len(found) < needed:
        raise UserError(
            f"{stream.name} has only {len(found)} different questions, not the {train} + {validation} of this command",
            where=f"size={train} validation={validation}",
            why="a question in both files would make validation meaningless, and equal rows repeat a problem",
            fix=f"lower size and validation to at most {len(found)} together, or give parameters with more questions",
        )
    return {VALIDATION: found[:validation], TRAIN: found[validation:]}


def to_rows(problems: list[Problem], split_name: str, wording: Wording) -> list[dict[str, Any]]:
    """Return the rows in verl's schema.

    If a problem has no right answer, every ground truth is an object, because a column has one type, and nobody takes
    an object for an answer (`qarl.data.ground_truths`)."""
    all_answered = all(problem.answer is not None for problem in problems)
    return [
        {
            "data_source": problem.data_source,
            "prompt": wording.messages(problem.question),
            "ability": problem.data_source.partition("/")[0],
            "reward_model": {
                "style": "rule",
                "ground_truth": problem.answer
                if all_answered
                else {"answer": problem.answer or ""},
            },
            "extra_info": {"split": split_name, "index": index, **problem.extra_info},
        }
        for index, problem in enumerate(problems)
    ]
