"""The figures of an evaluation: one for each data source (`data_source` of a prompt), and their mean.

A prompt's figure is the mean reward of its answers, a data source's the mean of its prompts, and `val/accuracy` the
mean of the data sources, in which each counts once however many prompts it has. So it needs no sizes, is the same in
every backend, and is what `qarl eval` and the papers' tables call the average. With 0/1 rewards the figures are
accuracies.

NaN is not left out: a source of NaN makes the mean NaN, because a mean of the others would look like a result. verl has
no mean over data sources. Of a source whose prompts have different numbers of answers it has a figure for each number.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

Answer = tuple[str, Hashable, float]
"""Data source, prompt and reward of an answer. A prompt is any value that no other prompt of its data source has."""
MEAN = "val/accuracy"
OF_SOURCE = f"{MEAN}/"
"""Begins the metric of a data source. It is only logged if there are several."""
WEIGHTS = "each data source counts once"
"""How `MEAN` weighs the data sources, in words."""


def answers_metrics(answers: Iterable[Answer]) -> dict[str, float]:
    """Return the metrics of an evaluation."""
    sources: dict[str, dict[Hashable, list[float]]] = {}
    for source, prompt, reward in answers:
        rewards = sources.setdefault(source, {}).setdefault(prompt, [])
        rewards.append(float(reward))
    figures = {}
    for source, prompts in sources.items():
        of_prompts = [mean(rewards) for rewards in prompts.values()]
        figures[source] = mean(of_prompts)
    return sources_metrics(figures)


def sources_metrics(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an evaluation whose data sources have these `figures`. Without one, return {}."""
    if not figures:
        return {}
    metrics = {MEAN: mean([*figures.values()])}
    if len(figures) > 1:
        metrics |= {OF_SOURCE + in_words(source): figure for source, figure in figures.items()}
    return metrics


def in_words(source: str) -> str:
    """Return a data source's name as it stands in metrics. One of white space alone is quoted, an empty one too."""
    return source if source.strip() else repr(source)


def mean(values: Sequence[float]) -> float:
    """Return the mean. Values that are not finite are allowed, which `statistics.fmean` refuses for some."""
    return sum(values) / len(values)
