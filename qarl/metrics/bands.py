"""What to set if TBPO's bands do not suit the length of the responses. The doctor and a run give the same advice.

A sequence ratio is a geometric mean over tokens, so its spread is proportional to 1/sqrt(tokens). The paper's bands,
3e-4 to 7e-4 (arXiv 2604.07853, appendix B), are for responses of up to 16384 tokens. Before the run, the doctor scales
them from that length, as `actor.band_scaling=length` does. After some steps, the run has measured which bands it needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from qarl.tbpo.config import TBPOConfig

PAPER = TBPOConfig()
"""The paper's bands, with the response length that they are for."""


def bands_in_force(actor: Mapping[str, Any]) -> dict[str, float]:
    """Return name -> width of the bands that take effect, of `actor`, a config's section of that name."""
    given = asdict(PAPER) | dict(actor)
    names = ["seq_clip_ratio_high", "neg_seq_clip_ratio_low", "neg_seq_clip_ratio_high"]
    names += ["seq_clip_ratio_low"] if given["positive_band"] == "two_sided" else []
    return {name: given[name] for name in names}


def scaled(width: float, tokens: int, reference: int = PAPER.band_reference_length) -> float:
    """Return the band for a response of `tokens`, if `width` is that for a response of `reference` tokens."""
    return width * math.sqrt(reference / tokens)


def how_to_set(actor: Mapping[str, Any], factor: float, at_reference: float | None = None) -> str:
    """Return the keys to set so that the bands in force become `factor` times as wide.

    `at_reference`: the narrowest band with `actor.band_scaling=length`, an alternative. None: that of the paper."""
    bands = bands_in_force(actor)
    text = "set " + ", ".join(f"actor.{name}={width * factor:.1e}" for name, width in bands.items())
    if actor.get("band_scaling", PAPER.band_scaling) == "length":
        return text
    reference = actor.get("band_reference_length", PAPER.band_reference_length)
    if at_reference is None:
        return f"{text}, or actor.band_scaling=length with the paper's bands, which scales them from {reference} tokens"
    return f"{text}, or actor.band_scaling=length with bands of {at_reference:.1e} (at {reference} tokens)"
