"""The figures of an evaluation: one for each data source (`data_source` of a prompt), and their mean.

A prompt's figure is the mean reward of its answers, a data source's the mean of its prompts, and `val/accuracy` the
mean of the data sources, in which each counts once however many prompts it has. So it needs no sizes, is the same in
every backend, and is what `qarl eval` and the papers' tables call the average. With 0/1 rewards the figures are
accuracies.

With several answers to a prompt, `val/best@N` is the mean over prompts of the best of its N answers, pass@N with 0/1
rewards. verl's `best@N/mean` draws N of these N answers with replacement, so that it misses some, and is lower.

NaN is not left out: a source of NaN makes the mean NaN, because a mean of the others would look like a result. verl has
no mean over data sources. Of a source whose prompts have different numbers of answers it has a figure for each number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

Answer = tuple[str, Hashable, float]
"""Data source, prompt and reward of an answer. A prompt is any value that no other prompt of its data source has."""
MEAN = "val/accuracy"
OF_SOURCE = f"{MEAN}/"
"""Begins the metric of a data source. It is only logged if there are several."""
BEST = "val/best@"
"""Begins the metric of the best answers, with their number behind it."""
WEIGHTS = "each data source counts once"
"""How `MEAN` weighs the data sources, in words."""


def answers_metrics(answers: Iterable[Answer]) -> dict[str, float]:
    """Return the metrics of an evaluation."""
    sources: dict[str, dict[Hashable, list[float]]] = {}
    for source, prompt, reward in answers:
        rewards = sources.setdefault(source, {}).setdefault(prompt, [])
        rewards.append(float(reward))
    metrics = sources_metrics(_figures(sources, mean))
    for count in sorted({len(rewards) for of in sources.values() for rewards in of.values()}):
        if count == 1:
            continue
        alike = {
            source: {prompt: rewards for prompt, rewards in of.items() if len(rewards) == count}
            for source, of in sources.items()
        }
        present = {source: of for source, of in alike.items() if of}
        metrics |= sources_metrics(_figures(present, largest), name=f"{BEST}{count}")
    return metrics


def _figures(
    sources: Mapping[str, Mapping[Hashable, Sequence[float]]],
    of_prompt: Callable[[Sequence[float]], float],
) -> dict[str, float]:
    """Return the mean over the prompts of each data source of `of_prompt`."""
    return {
        source: mean([of_prompt(rewards) for rewards in prompts.values()])
        for source, prompts in sources.items()
    }


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


def largest(values: Sequence[float]) -> float:
    """Return the largest value, or NaN if one is NaN."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def mean(values: Sequence[float]) -> float:
    """Return the mean. Values that are not finite are allowed, which `statistics.fmean` refuses for some."""
    return sum(values) / len(values)
