"""The figures of an evaluation: one for each data source (`data_source` of a prompt), and their mean.

A prompt's figure is the mean reward of its answers, a data source's the mean of its prompts, and `val/accuracy` the
mean of the data sources, in which each counts once however many prompts it has. So it needs no sizes, is the same in
every backend, and is what `qarl eval` and the papers' tables call the average. With 0/1 rewards the figures are
accuracies.

With N answers to a prompt there is also, for k = 2, 4, 8, ... below N and for N itself,

    val/best@k   the mean over prompts of the best of k answers, pass@k with 0/1 rewards. It is the exact mean over all
                 choices of k of the N answers. verl's `best@k/mean` draws k of them with replacement a thousand times,
                 so it is random and, because it draws some answers twice, lower
    val/maj@N    the mean over prompts of the reward of the answer that most of the N answers give, if the reward
                 function says what an answer is (`pred` in its dict, as in verl). Answers that are given as often as
                 each other count alike; verl takes the first

Each has a 95% interval over prompts (`_low`, `_high`; `qarl.metrics.estimates`).

NaN is not left out: a source of NaN makes the mean NaN, because a mean of the others would look like a result. verl has
no mean over data sources. Of a source whose prompts have different numbers of answers it has a figure for each number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from qarl.metrics.estimates import Estimate, average, interval


class Answer(NamedTuple):
    """An answer to a prompt of a data source, and its reward. `prompt`: any value that no other prompt of its source
    has. `vote`: what the answer is, as equal text for equal answers; None if that is not known."""

    source: str
    prompt: Hashable
    reward: float
    vote: str | None = None


Figures = dict[str, dict[Hashable, float]]
"""Data source -> prompt -> a figure of its answers."""
MEAN = "val/accuracy"
OF_SOURCE = f"{MEAN}/"
"""Begins the metric of a data source. It is only logged if there are several."""
MEANS = "mean"
"""The figure that is the mean of a prompt's answers. Its metric is `MEAN`."""
ENDS = ("_low", "_high")
"""End the metrics that are the ends of a figure's interval."""
WEIGHTS = "each data source counts once"
"""How `MEAN` weighs the data sources, in words."""


def answers_metrics(answers: Iterable[Answer]) -> dict[str, float]:
    """Return the metrics of an evaluation."""
    metrics: dict[str, float] = {}
    for name, figures in prompt_figures(answers).items():
        metric = MEAN if name == MEANS else f"val/{name}"
        means = {source: mean([*of_prompts.values()]) for source, of_prompts in figures.items()}
        metrics |= sources_metrics(means, name=metric)
        estimate = estimated(figures)
        ends = (estimate.low, estimate.high)
        metrics |= {f"{metric}{end}": value for end, value in zip(ENDS, ends, strict=True)}
    return metrics


def estimated(figures: Figures) -> Estimate:
    """Return the mean of the data sources with its interval, which is NaN if a figure is not finite."""
    sources = {source: [*of_prompts.values()] for source, of_prompts in figures.items()}
    if not all(math.isfinite(value) for values in sources.values() for value in values):
        return Estimate(math.nan, math.nan, math.nan)
    if len(sources) == 1:
        return interval(*sources.values())
    return average(sources)


def prompt_figures(answers: Iterable[Answer]) -> dict[str, Figures]:
    """Return the figures of each prompt: `mean`, and for prompts with several answers `best@k` and `maj@N`."""
    grouped: dict[str, dict[Hashable, list[Answer]]] = {}
    for answer in answers:
        of_source = grouped.setdefault(answer.source, {})
        of_source.setdefault(answer.prompt, []).append(answer)
    groups = [group for of in grouped.values() for group in of.values()]
    if not groups:
        return {}
    counts = {*map(len, groups)} - {1}
    most = max(map(len, groups))
    figures = {MEANS: _figures(grouped, range(1, most + 1), mean_of)}
    powers = {2**power for power in range(1, most.bit_length()) if 2**power < most}
    for k in sorted(counts | powers):
        figures[f"best@{k}"] = _figures(grouped, range(k, most + 1), _best_of(k))
    if any(answer.vote is not None for group in groups for answer in group):
        for count in sorted(counts):
            figures[f"maj@{count}"] = _figures(grouped, range(count, count + 1), majority)
    return figures


def _figures(
    grouped: Mapping[str, Mapping[Hashable, Sequence[Answer]]],
    sizes: range,
    of_prompt: Callable[[Sequence[Answer]], float],
) -> Figures:
    """Return `of_prompt` of each prompt that has as many answers as `sizes` allows."""
    figures = {
        source: {prompt: of_prompt(group) for prompt, group in of.items() if len(group) in sizes}
        for source, of in grouped.items()
    }
    return {source: of for source, of in figures.items() if of}


def mean_of(group: Sequence[Answer]) -> float:
    """Return the mean reward of the answers to a prompt."""
    return mean([answer.reward for answer in group])


def _best_of(k: int) -> Callable[[Sequence[Answer]], float]:
    return lambda group: best_of([answer.reward for answer in group], k)


def best_of(rewards: Sequence[float], k: int) -> float:
    """Return the mean, over all choices of `k` of the rewards, of the largest of them."""
    if any(map(math.isnan, rewards)):
        return math.nan
    ascending = sorted(rewards)
    whole = math.comb(len(ascending), k)
    shares = [math.comb(below, k - 1) / whole for below in range(len(ascending))]
    pairs = zip(shares, ascending, strict=True)
    return sum(share * reward for share, reward in pairs if share)


def majority(group: Sequence[Answer]) -> float:
    """Return the mean reward of the answers that most of the group give, or of all if none has a vote."""
    rewards: dict[str, list[float]] = {}
    for answer in group:
        if answer.vote is not None:
            rewards.setdefault(answer.vote, []).append(answer.reward)
    if not rewards:
        return mean_of(group)
    most = max(map(len, rewards.values()))
    return mean([mean(values) for values in rewards.values() if len(values) == most])


def sources_metrics(figures: Mapping[str, float], name: str = MEAN) -> dict[str, float]:
    """Return the metrics of an evaluation whose data sources have these `figures`. Without one, return {}.

    `name`: of the mean; that of a data source follows it."""
    if not figures:
        return {}
    metrics = {name: mean([*figures.values()])}
    if len(figures) > 1:
        metrics |= {f"{name}/{in_words(source)}": figure for source, figure in figures.items()}
    return metrics


def in_words(source: str) -> str:
    """Return a data source's name as it stands in metrics. One of white space alone is quoted, an empty one too."""
    return source if source.strip() else repr(source)


def mean(values: Sequence[float]) -> float:
    """Return the mean. Values that are not finite are allowed, which `statistics.fmean` refuses for some."""
    return sum(values) / len(values)
