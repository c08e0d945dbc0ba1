"""Checks that TBPO's bands are wide enough for the length of the responses.

A sequence ratio is a geometric mean over tokens, so its spread is proportional to 1/sqrt(tokens). The paper's bands,
3e-4 to 7e-4 (arXiv 2604.07853, appendix B), are for responses of up to 16384 tokens.
"""

from __future__ import annotations

import math

from qarl.doctor.context import Context
from qarl.doctor.findings import Topic

PAPER_BAND, SHORTEST = 3e-4, 1000
"""The paper's narrowest band, and the smallest response length (in tokens) for which that band gives no warning."""


def check_bands(context: Context, topic: Topic) -> None:
    """Add a finding that says whether TBPO's bands are wide enough for the length of the responses."""
    actor, length = context.config.actor, context.config.data.max_response_length
    if actor.loss != "tbpo":
        topic.ok(f"actor.loss={actor.loss} has no bands")
        return
    bands = {
        "actor.seq_clip_ratio_high": actor.seq_clip_ratio_high,
        "actor.neg_seq_clip_ratio_low": actor.neg_seq_clip_ratio_low,
        "actor.neg_seq_clip_ratio_high": actor.neg_seq_clip_ratio_high,
    }
    if actor.positive_band == "two_sided":
        bands["actor.seq_clip_ratio_low"] = actor.seq_clip_ratio_low
    scale = math.sqrt(actor.band_reference_length / length) if actor.band_scaling == "length" else 1.0
    bands = {key: band * scale for key, band in bands.items()}
    needed = PAPER_BAND * math.sqrt(SHORTEST / length)
    narrow = {key: band for key, band in bands.items() if band < needed * (1 - 1e-9)}
    if narrow:
        topic.warning(
            f"bands of {min(narrow.values()):.1e} are narrow for responses of at most {length} tokens",
            where=", ".join(narrow),
            why="the spread of sequence ratios is proportional to 1/sqrt(tokens); the paper's bands are for up to "
            "16384 tokens, and responses outside their band have no gradient",
            fix=f"set actor.band_scaling=length, or set the bands to {needed / scale:.1e} or more, and watch "
            "actor/inside_band_frac_after_first",
        )
    else:
        topic.ok(f"bands of {min(bands.values()):.1e} to {max(bands.values()):.1e} suit {length} tokens")


CHECKS = (check_bands,)
