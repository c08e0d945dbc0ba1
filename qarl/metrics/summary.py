"""The numbers of a run that its summary shows, from the metrics of its steps.

The summary is written at the end of a run, when an error would be most expensive. So `summarize` takes any history: a
metric that is missing, or is no number, is left out of the figure that needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from qarl.metrics.validation import MEAN, OF_SOURCE, WEIGHTS, mean

Entry = Mapping[str, Any]
"""The metrics of one step."""
Reduce = Callable[[Sequence[float]], float]
STEP_SECONDS = "timing_s/step"
"""Every training step logs it, and no evaluation does."""


def largest(values: Sequence[float]) -> float:
    """Return the largest value, or NaN if one is NaN: a mismatch that is not known is not a small one."""
    return math.nan if any(map(math.isnan, values)) else max(values)


_OPTIONAL: dict[str, tuple[str, Reduce]] = {
    "other_experts_frac_mean": ("mismatch/other_experts_frac", mean),
    "rejected_response_frac_mean": ("correction/rejected_response_frac", mean),
    "mismatch_of_version_abs_mean": ("mismatch/of_version_abs_mean", mean),
    "mismatch_of_version_abs_max": ("mismatch/of_version_abs_max", largest),
    "staleness_age_mean": ("staleness/age_mean", mean),
    "staleness_age_max": ("staleness/age_max", largest),
    "staleness_ratio_abs_mean": ("staleness/ratio_abs_mean", mean),
    "staleness_checked_frac_mean": ("staleness/checked_frac", mean),
}
"""Figures that are left out if no step logs them. With `trainer.staleness` the summary's other figures of the mismatch
contain the staleness, and `mismatch_of_version_*` do not."""


def summarize(history: Iterable[Any]) -> dict[str, Any]:
    """Return a few numbers that summarise a run. Means are over the training steps.

    `history`: metrics of each step with its number, `step`, in order. Anything else in it is skipped.

    `accuracy_before` is the accuracy of step 0, before the training, and `accuracy_after` that of the last evaluation
    after it. With several data sources they are means, `accuracy_mean` says how the sources weigh in them, and each
    source has its own two figures."""
    entries = [entry for entry in history if isinstance(entry, Mapping)]

    def figure(key: str, reduce: Reduce = mean) -> float | None:
        values = numbers(entries, key)
        return reduce(values) if values else None

    optional = {name: figure(key, reduce) for name, (key, reduce) in _OPTIONAL.items()}
    return {
        "steps": len(numbers(entries, STEP_SECONDS)),
        **accuracies(entries),
        "mismatch_k3_mean": figure("mismatch/k3"),
        "mismatch_abs_mean": figure("mismatch/abs_mean"),
        "mismatch_abs_max": figure("mismatch/abs_max", largest),
        "inside_band_frac_after_first_mean": figure("actor/inside_band_frac_after_first"),
        "skipped_optimizer_steps": sum(numbers(entries, "actor/skipped_steps")),
        "failed_checkpoints": sum(numbers(entries, "checkpoint/failed")),
        "seconds_to_first_step": figure("startup/seconds_to_first_step"),
        "seconds_per_step": figure(STEP_SECONDS),
        "publish_seconds_per_step": figure("timing_s/publish"),
        **{name: value for name, value in optional.items() if value is not None},
    }


def accuracies(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the figures of the evaluations before and after the training, None where there was none."""
    before = [entry for entry in entries if entry.get("step") == 0]
    after = [entry for entry in entries if entry.get("step") != 0]
    both: dict[str, Any] = {}
    both["accuracy_before"] = last(before, MEAN)
    both["accuracy_after"] = last(after, MEAN)
    logged = dict.fromkeys(chain.from_iterable(entries))
    names = [key for key in logged if str(key).startswith(OF_SOURCE)]
    if names:
        both["accuracy_mean"] = WEIGHTS
    for name in names:
        source = name.removeprefix(OF_SOURCE)
        both[f"accuracy_before/{source}"] = last(before, name)
        both[f"accuracy_after/{source}"] = last(after, name)
    return both


def last(entries: Sequence[Entry], key: str) -> float | None:
    """Return the last value of a metric, or None if it has none."""
    values = numbers(entries, key)
    return values[-1] if values else None


def numbers(entries: Iterable[Entry], key: str) -> list[float]:
    """Return the values of a metric that are numbers, NaN and infinities among them."""
    values = [as_number(entry.get(key)) for entry in entries]
    return [value for value in values if value is not None]


def as_number(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond the largest float
        return None
