"""Checks that TBPO's bands are wide enough for the length of the responses (`qarl.metrics.bands`)."""

from __future__ import annotations

from qarl.doctor.context import Context
from qarl.doctor.findings import Topic
from qarl.metrics.bands import PAPER, bands_in_force, how_to_set, scaled

SHORTEST = 1000
"""The smallest response length (in tokens) for which the paper's narrowest band gives no warning. The paper itself uses
its bands at 3072 tokens."""


def check_bands(context: Context, topic: Topic) -> None:
    """Add a finding that says whether TBPO's bands are wide enough for the length of the responses."""
    actor, length = context.config.actor, context.config.data.max_response_length
    if actor.loss != "tbpo":
        topic.ok(f"actor.loss={actor.loss} has no bands")
        return
    given = bands_in_force(actor.model_dump())
    by_length = actor.band_scaling == "length"
    bands = {
        f"actor.{name}": scaled(band, length, actor.band_reference_length) if by_length else band
        for name, band in given.items()
    }
    narrowest = PAPER.neg_seq_clip_ratio_low
    limit = scaled(narrowest, length, SHORTEST)
    narrow = {key: band for key, band in bands.items() if band < limit * (1 - 1e-9)}
    if narrow:
        topic.warning(
            f"bands of {min(narrow.values()):.1e} are narrow for responses of at most {length} tokens",
            where=", ".join(narrow),
            why="the spread of sequence ratios is proportional to 1/sqrt(tokens); the paper's bands are for up to "
            "16384 tokens, and responses outside their band have no gradient",
            fix=how_to_set(actor.model_dump(), scaled(narrowest, length) / min(bands.values()))
            + "; watch actor/inside_band_frac_after_first",
        )
    else:
        topic.ok(f"bands of {min(bands.values()):.1e} to {max(bands.values()):.1e} suit {length} tokens")


CHECKS = (check_bands,)
