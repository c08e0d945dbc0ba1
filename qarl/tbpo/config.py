"""The keys of TBPO. The defaults are the paper's values (arXiv 2604.07853, appendix B).

The defaults of the run's config and of verl's config come from this module. It does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

MismatchOutsideCap = Literal["truncate", "drop"]
PositiveBand = Literal["upper", "two_sided"]
BandScaling = Literal["none", "length"]


@dataclass(frozen=True)
class TBPOConfig:
    """Bands and cap of the TBPO loss, all dimensionless. `qarl.tbpo.loss` defines ratio r, weight w and advantage A.

    seq_clip_ratio_*        distances from 1 of the edges of r's band if A > 0
    neg_seq_clip_ratio_*    distances from 1 of the edges of r's band if A < 0
    seq_tis_imp_ratio_cap   C; w is clipped to [1/C, C]
    band_scaling            with "length", the bands of a response of T tokens are multiplied by
                            sqrt(`band_reference_length` / T)

    r is a geometric mean over T tokens, so its spread is proportional to 1/sqrt(T), and short responses need wider
    bands. The paper's bands are for responses of up to 16384 tokens.

    Raises ValueError on a number out of range, an unknown option, or an aggregation other than "seq-mean-token-mean".
    """

    seq_clip_ratio_high: float = 4e-4
    seq_clip_ratio_low: float = 3e-4
    neg_seq_clip_ratio_low: float = 3e-4
    neg_seq_clip_ratio_high: float = 7e-4
    seq_tis_imp_ratio_cap: float = 2.0
    mismatch_outside_cap: MismatchOutsideCap = "truncate"
    positive_band: PositiveBand = "upper"
    band_scaling: BandScaling = "none"
    band_reference_length: int = 16384
    loss_agg_mode: str = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(field.default, str):
                continue
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{field.name} must be a finite number, got {value!r}")
        for name, lowest, highest, what in (
            ("seq_clip_ratio_low", 0, 1, "it is a distance below a ratio of 1"),
            ("seq_clip_ratio_high", 0, 1e6, "it is a distance above a ratio of 1"),
            ("neg_seq_clip_ratio_low", 0, 1, "it is a distance below a ratio of 1"),
            ("neg_seq_clip_ratio_high", 0, 1e6, "it is a distance above a ratio of 1"),
            ("seq_tis_imp_ratio_cap", 1, 1e6, "the mismatch weight is clipped to [1/cap, cap]"),
            ("band_reference_length", 1, 1e9, "it is a number of tokens"),
        ):
            value = getattr(self, name)
            if not (lowest <= value <= highest and value > 0):
                raise ValueError(f"{name} must be positive and in [{lowest}, {highest:g}]: {what}; got {value}")
        for name, allowed in (
            ("mismatch_outside_cap", get_args(MismatchOutsideCap)),
            ("positive_band", get_args(PositiveBand)),
            ("band_scaling", get_args(BandScaling)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        if self.loss_agg_mode != "seq-mean-token-mean":
            raise ValueError(
                f"loss_agg_mode must be 'seq-mean-token-mean', because TBPO has one ratio per response; "
                f"got {self.loss_agg_mode!r}"
            )
