"""Whether TBPO's bands suit the length of the responses, from the config alone.

`qarl train`, its dry run and the doctor say it. This module imports no torch, so a dry run stays fast.
"""

from __future__ import annotations

from qarl.config import Config
from qarl.errors import UserError
from qarl.metrics.band_advice import PAPER, bands_in_force, how_to_set, scaled

SHORTEST = 1000
"""The smallest response length (in tokens) for which the paper's narrowest band gives no warning. The paper itself uses
its bands at 3072 tokens."""


def band_widths(config: Config) -> dict[str, float]:
    """Return key -> width of the bands of a run with TBPO, for a response of `data.max_response_length` tokens."""
    actor = config.actor
    widths = {f"actor.{name}": width for name, width in bands_in_force(actor.model_dump()).items()}
    if actor.band_scaling != "length":
        return widths
    length = config.data.max_response_length
    return {
        key: scaled(width, length, actor.band_reference_length) for key, width in widths.items()
    }


def narrow_bands(config: Config) -> UserError | None:
    """Return a warning if the bands are too narrow for the responses (`qarl.metrics.band_advice`), or None."""
    length = config.data.max_response_length
    if config.actor.loss != "tbpo":
        return None
    widths = band_widths(config)
    narrowest = min(widths.values())
    paper = PAPER.neg_seq_clip_ratio_low
    limit = scaled(paper, length, SHORTEST) * (1 - 1e-9)
    if narrowest >= limit:
        return None
    wider = how_to_set(config.actor.model_dump(), scaled(paper, length) / narrowest)
    return UserError(
        f"bands of {narrowest:.1e} are narrow for responses of at most {length} tokens",
        where=", ".join(key for key, width in widths.items() if width < limit),
        why="the spread of sequence ratios is proportional to 1/sqrt(tokens); the paper's bands are for up to "
        "16384 tokens, and responses outside their band have no gradient",
        fix=f"{wider}; watch actor/inside_band_frac_after_first",
    )
