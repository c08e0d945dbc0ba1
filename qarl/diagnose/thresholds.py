"""Thresholds that lose a stated share of the samples, from measured ratios, and how certain they are.

A threshold τ rejects (or truncates) what is above it. `threshold` returns the smallest τ above which at most a share s
of the samples lies, rounded up to three digits, since that is what one writes into a config. It says what a correction
costs, and not whether training is better with it.

The prompts are the sample, because responses to one prompt are alike (as in `qarl.metrics.estimates`):

    interval of τ          the middle 95% over bootstraps that draw the prompts again with replacement (arXiv 2411.00640
                           recommends the same unit for errors of evaluations)
    interval of a share    Wilson's, whose number of trials is the one that would give the variance between the prompts.
                           It is not empty where nothing, or everything, is above τ
    share on other prompts τ of every second prompt, applied to the others, and the other way round: τ fits the prompts
                           that it comes from a little too well

A share of s needs samples above τ, or τ is only the largest value seen. So nothing is proposed unless `FEWEST` samples
of `FEWEST_PROMPTS` prompts are above it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

FEWEST = 10
FEWEST_PROMPTS = 5
DRAWS = 400
Z = 1.959963984540054
"""The 97.5% quantile of the normal distribution."""
DIGITS = 3


@dataclass(frozen=True)
class Sample:
    """Values of one statistic, FP64 [N], and the number of the prompt that each is from, int64 [N]."""

    values: np.ndarray
    prompts: np.ndarray

    def of_prompts(self, remainder: int) -> Sample:
        """Return every second prompt's values. `remainder`: 0 or 1."""
        chosen = self.prompts % 2 == remainder
        return Sample(self.values[chosen], self.prompts[chosen])


@dataclass(frozen=True)
class Share:
    """A share of samples with its 95% interval."""

    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Proposal:
    """A threshold. `low`, `high`: its 95% interval. `loses`: the share that is above it. `on_other_prompts`: that share
    on prompts which the threshold does not come from. `above`, `prompts_above`: how many samples, and of how many
    prompts."""

    value: float
    low: float
    high: float
    loses: float
    on_other_prompts: float
    above: int
    prompts_above: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def threshold(values: np.ndarray, share: float, *, origin: float = 0.0) -> float:
    """Return the smallest of `values` above which at most `share` of them lie, rounded up.

    Its distance from `origin` gets `DIGITS` digits. The origin of ratios is 1."""
    allowed = math.floor(share * len(values) + 1e-9)
    exact = float(np.sort(values)[len(values) - 1 - allowed])
    return float(f"{origin + rounded_up(exact - origin):.12g}")


def rounded_up(value: float) -> float:
    """Return the smallest number of `DIGITS` significant digits that is not below `value`."""
    if value == 0 or not math.isfinite(value):
        return value
    digits = DIGITS - 1 - math.floor(math.log10(abs(value)))
    nearest = round(value, digits)
    return nearest if nearest >= value else round(nearest + 10.0**-digits, digits)


def share_above(sample: Sample, value: float) -> Share:
    """Return the share of the samples above `value`."""
    above = sample.values > value
    share = float(above.mean())
    hits = _by_prompt(sample.prompts, above)
    counts = _by_prompt(sample.prompts, np.ones(len(above)))
    prompts = len(counts)
    total = float(counts.sum())
    squares = ((hits - share * counts) ** 2).sum()
    variance = float(squares / total**2) * prompts / max(prompts - 1, 1)
    of_one = share * (1 - share)
    trials = of_one / variance if variance else float(prompts)
    scale = 1 + Z**2 / trials
    centre = (share + Z**2 / (2 * trials)) / scale
    half = Z / scale * math.sqrt(of_one / trials + Z**2 / (4 * trials**2))
    low = min(share, centre - half)
    high = max(share, centre + half)
    return Share(share, low=max(0.0, low), high=min(1.0, high))


def propose(sample: Sample, share: float, *, origin: float = 0.0, seed: int = 0) -> Proposal | str:
    """Return the threshold that loses `share` of the samples, or a sentence that says why there is none.

    `origin`: the value of a sample that needs no correction."""
    if not len(sample.values):
        return "there is no sample"
    if not (sample.values != origin).any():
        return f"every value is {origin:g}, so nothing is to be corrected"
    value = threshold(sample.values, share, origin=origin)
    above = sample.values > value
    prompts_above = len(np.unique(sample.prompts[above]))
    if above.sum() < FEWEST or prompts_above < FEWEST_PROMPTS:
        return (
            f"only {above.sum()} of {len(above)} samples, of {prompts_above} prompts, are above {value:g}: raise "
            f"batches until {math.ceil(FEWEST / share)} are sampled, or raise share"
        )
    low, high = _interval(sample, share, seed)
    on_others = [_on_others(sample, half, share, origin) for half in (0, 1)]
    return Proposal(
        value=value,
        low=low,
        high=high,
        loses=float(above.mean()),
        on_other_prompts=float(np.mean(on_others)),
        above=int(above.sum()),
        prompts_above=prompts_above,
    )


def _on_others(sample: Sample, remainder: int, share: float, origin: float) -> float:
    """Return what the threshold of every second prompt loses of the other prompts' samples."""
    value = threshold(sample.of_prompts(remainder).values, share, origin=origin)
    others = sample.of_prompts(1 - remainder)
    return float((others.values > value).mean())


def _by_prompt(prompts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the sum of `values` for each prompt that has samples."""
    sums = np.bincount(prompts, weights=values)
    return sums[np.bincount(prompts) > 0]


def _interval(sample: Sample, share: float, seed: int) -> tuple[float, float]:
    """Return the middle 95% of the threshold over `DRAWS` bootstraps of the prompts."""
    order = np.argsort(-sample.values, kind="stable")
    values = sample.values[order]
    names, prompts = np.unique(sample.prompts[order], return_inverse=True)
    random = np.random.default_rng(seed)
    count = len(names)
    thresholds = []
    for _ in range(DRAWS):
        drawn = random.integers(count, size=count)
        times = np.bincount(drawn, minlength=count)[prompts]
        down_to = times.cumsum()
        # The largest value that, counted too, makes more than the share: what is above it is within the share.
        index = np.searchsorted(down_to, share * down_to[-1] + 1e-9, side="right")
        thresholds.append(float(values[index]))
    low, high = np.quantile(thresholds, (0.025, 0.975))
    return float(low), float(high)
