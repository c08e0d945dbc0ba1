"""Plot how likely the tokens of positive and negative samples were, and how far updates moved them.

These plots are the QaRL paper's figures 4c and 5b (arXiv 2604.07853), made from the metrics `tokens/*`
(`qarl.tbpo.tokens`). Figure 4c shows that unlikely tokens are mostly in negative samples. Figure 5b shows that the
ratios of unlikely tokens have the heaviest tail. The paper plots single tokens. QaRL counts tokens in four classes of
probability, which every run can log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qarl.tbpo.token_classes import CLASSES, SIGNS

LABELS = ("p < 0.001", "0.001 to 0.01", "0.01 to 0.1", "p > 0.1")
COLORS = {"pos": "C0", "neg": "C3"}
NAMES = {"pos": "positive samples (A > 0)", "neg": "negative samples (A < 0)"}


def class_values(
    entries: Sequence[Mapping[str, Any]], sign: str, what: str, over_steps: Callable[[np.ndarray], float]
) -> list[float]:
    """Return, for each class, `over_steps` of the metric tokens/SIGN_CLASS_WHAT, or NaN if there are no values."""
    found = []
    for label in CLASSES:
        key = f"tokens/{sign}_{label}_{what}"
        values = np.asarray([float(entry[key]) for entry in entries if key in entry])
        values = values[np.isfinite(values)]
        found.append(float(over_steps(values)) if values.size else float("nan"))
    return found


def plot_error_tokens(
    entries: Sequence[Mapping[str, Any]], output: Path, new_axes: Callable[[str, str], Any], save: Callable[..., Path]
) -> list[Path]:
    """Write token_shares.png and token_moves.png, or nothing if the run has no `tokens/*` metrics.

    `new_axes`, `save`: functions of `qarl.metrics.plots`."""
    shares = {sign: class_values(entries, sign, "frac", np.mean) for sign in SIGNS}
    if np.isnan(list(shares.values())).all():
        return []
    axes = new_axes("Tokens by their probability under the old policy", "share of the tokens of that sign")
    for sign, shift in zip(SIGNS, (-0.2, 0.2), strict=True):
        axes.bar(np.arange(len(CLASSES)) + shift, shares[sign], 0.38, color=COLORS[sign], label=NAMES[sign])
    axes.set_yscale("log")
    _name_classes(axes)
    written = [save(axes, output / "token_shares.png")]

    axes = new_axes("How far updates move tokens", "|log ratio| of a token, nats")
    for sign, shift in zip(SIGNS, (-0.1, 0.1), strict=True):
        places = np.arange(len(CLASSES)) + shift
        mean, most = (
            class_values(entries, sign, "moved_mean", np.mean),
            class_values(entries, sign, "moved_max", np.max),
        )
        axes.plot(places, mean, "o-", color=COLORS[sign], label=f"{NAMES[sign]}: mean")
        axes.plot(places, most, "^:", color=COLORS[sign], label=f"{NAMES[sign]}: largest of the run")
    axes.set_yscale("symlog", linthresh=1e-4)
    _name_classes(axes)
    return [*written, save(axes, output / "token_moves.png")]


def _name_classes(axes: Any) -> None:
    axes.set_xticks(range(len(CLASSES)), LABELS)
    axes.set_xlabel("probability of the token under the old policy")
