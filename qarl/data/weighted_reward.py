"""Several reward functions whose scores are added (`reward.functions`), as one `Reward`.

Each has its own worker processes, and all are called in parallel. The outcome of a response is the
weighted sum, with each function's score under `rewards/NAME`, so that every backend can log it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from qarl.data.reward_outcomes import Outcome, Refused, Scored, is_number
from qarl.data.reward_workers import Reward, then

PREFIX = "rewards/"
"""Begins the key of a function's score. TRL's metrics begin with it, too."""
ACCURACY = "acc"
"""Key that verl evaluates instead of the score. That of a single function would stand for the sum."""


class Part(NamedTuple):
    """One of the functions. `label`: what metrics call it."""

    label: str
    weight: float
    reward: Reward


class WeightedReward:
    """The sum of the scores of `parts`, times their weights."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    @property
    def name(self) -> str:
        return " + ".join(part.label for part in self.parts)

    @property
    def scores_all(self) -> bool:
        return any(part.reward.scores_all for part in self.parts)

    def submit(self, arguments: Mapping[str, Any], timeout_s: float | None) -> Future[Outcome]:
        outcomes = [part.reward.submit(arguments, timeout_s) for part in self.parts]
        return then(gathered(outcomes), self._sum)

    def submit_all(
        self, rows: Sequence[Mapping[str, Any]], timeout_s: float | None
    ) -> list[Future[Outcome]]:
        of_parts = [part.reward.submit_all(rows, timeout_s) for part in self.parts]
        return [then(gathered(outcomes), self._sum) for outcomes in zip(*of_parts, strict=True)]

    def load(self) -> None:
        for part in self.parts:
            part.reward.load()

    def stop(self) -> None:
        for part in self.parts:
            part.reward.stop()

    def _sum(self, outcomes: Sequence[Outcome]) -> Outcome:
        """Return the outcome of a response from those of the parts. The first refusal is that of all."""
        more: dict[Any, Any] = {}
        total = 0.0
        for part, outcome in zip(self.parts, outcomes, strict=True):
            if isinstance(outcome, Refused):
                return outcome._replace(name=outcome.name or part.reward.name)
            more |= {key: value for key, value in (outcome.more or {}).items() if key != ACCURACY}
            total += part.weight * outcome.score
        if not is_number(total):
            why = "a reward must be a finite number that FP32 can hold"
            return Refused(f"gives {total} in all", why, "lower the weights in reward.functions")
        scores = {
            f"{PREFIX}{part.label}": outcome.score
            for part, outcome in zip(self.parts, outcomes, strict=True)
            if isinstance(outcome, Scored)
        }
        return Scored(total, more | scores | {"score": total})


def gathered(futures: Sequence[Future[Any]]) -> Future[list[Any]]:
    """Return the future of all results. It fails with the first of `futures` that does."""
    together: Future[list[Any]] = Future()
    left = len(futures)
    lock = threading.Lock()

    def count(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        try:
            together.set_result([future.result() for future in futures])
        except BaseException as error:
            together.set_exception(error)

    for future in futures:
        future.add_done_callback(count)
    return together


def part_means(outcomes: Sequence[Scored], labels: Sequence[str]) -> dict[str, float]:
    """Return the mean score of each function of `reward.functions`. `labels`: `RewardConfig.labels`."""
    if not outcomes:
        return {}
    return {
        f"{PREFIX}{label}/mean": sum(
            float((each.more or {})[f"{PREFIX}{label}"]) for each in outcomes
        )
        / len(outcomes)
        for label in labels
    }
