"""How wide TBPO's bands should be.

A sequence ratio is a geometric mean over tokens, so its spread is proportional to 1/sqrt(tokens). The paper's bands,
3e-4 to 7e-4 (arXiv 2604.07853, appendix B), are for responses of up to 16384 tokens. Before the run, the doctor scales
them from that length, as `actor.band_scaling=length` does. After some steps, the run has measured which bands it needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from qarl.tbpo.config import TBPOConfig

Settings = Mapping[str, Any]
"""A config's section `actor`; missing keys have the paper's values."""
Step = tuple[float, float, float]
"""Three metrics of a step: `actor/band_p95_after_first`, `band_factor_p95_after_first` and
`inside_band_frac_after_first`."""
MOST_OUTSIDE = 0.1
"""If more than this fraction of the responses is outside, the advice is a warning."""
PAPER = TBPOConfig()
"""The paper's bands, with the response length that they are for."""


def band_advice(steps: Sequence[Step], actor: Settings) -> tuple[str, str]:
    """Return one line about the bands of `actor`, and what to set if they are too narrow, or ""."""
    at_reference, factor, inside = (median(values) for values in zip(*steps, strict=True))
    if factor == 0:
        return "bands: no sequence ratio has changed yet, so no width can be recommended", ""
    text = (
        f"bands: {1 - inside:.0%} of the responses are outside their band and teach nothing (after the first "
        f"mini-batch, median of {len(steps)} steps); bands {factor:.2g} times as wide would leave 5% outside"
    )
    if 1 - inside > MOST_OUTSIDE:
        return text, how_to_set(actor, factor, at_reference)
    return text, ""


def bands_in_force(actor: Settings) -> dict[str, float]:
    """Return name -> width of the bands that take effect."""
    settings = asdict(PAPER) | dict(actor)
    names = ["seq_clip_ratio_high", "neg_seq_clip_ratio_low", "neg_seq_clip_ratio_high"]
    if settings["positive_band"] == "two_sided":
        names.append("seq_clip_ratio_low")
    return {name: settings[name] for name in names}


def scaled(width: float, tokens: int, reference: int = PAPER.band_reference_length) -> float:
    """Return the band for a response of `tokens`, if `width` is that for a response of `reference` tokens."""
    return width * math.sqrt(reference / tokens)


def how_to_set(actor: Settings, factor: float, at_reference: float | None = None) -> str:
    """Return the keys to set so that the bands in force become `factor` times as wide.

    `at_reference`: the narrowest band with `actor.band_scaling=length`, an alternative. None: that of the paper."""
    widths = bands_in_force(actor).items()
    text = "set " + ", ".join(f"actor.{name}={width * factor:.1e}" for name, width in widths)
    if actor.get("band_scaling", PAPER.band_scaling) == "length":
        return text
    reference = actor.get("band_reference_length", PAPER.band_reference_length)
    if at_reference is None:
        return f"{text}, or actor.band_scaling=length with the paper's bands, which scales them from {reference} tokens"
    return f"{text}, or actor.band_scaling=length with bands of {at_reference:.1e} (at {reference} tokens)"
