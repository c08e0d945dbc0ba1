"""The keys of TBPO. The defaults are the paper's values (arXiv 2604.07853, appendix B).

`qarl.config` takes defaults and bounds of these keys from here, because this package imports neither torch nor any
other part of QaRL. The meaning of each key is in docs/lookup/config_reference.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

MismatchOutsideCap = Literal["truncate", "drop"]
PositiveBand = Literal["upper", "two_sided"]
BandScaling = Literal["none", "length"]
_NAMES = {
    "mismatch_outside_cap": MismatchOutsideCap,
    "positive_band": PositiveBand,
    "band_scaling": BandScaling,
}


def _number(default: float, **bounds: float) -> Any:
    """Return a field. `bounds`: as pydantic names them, `gt`, `ge` and `le`."""
    return field(default=default, metadata=bounds)


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

    seq_clip_ratio_high: float = _number(4e-4, gt=0, le=1e6)
    seq_clip_ratio_low: float = _number(3e-4, gt=0, le=1)
    neg_seq_clip_ratio_low: float = _number(3e-4, gt=0, le=1)
    neg_seq_clip_ratio_high: float = _number(7e-4, gt=0, le=1e6)
    seq_tis_imp_ratio_cap: float = _number(2.0, ge=1, le=1e6)
    mismatch_outside_cap: MismatchOutsideCap = "truncate"
    positive_band: PositiveBand = "upper"
    band_scaling: BandScaling = "none"
    band_reference_length: int = _number(16384, ge=1, le=10**9)
    loss_agg_mode: str = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        for key in fields(self):
            value = getattr(self, key.name)
            bounds = key.metadata
            if key.name in _NAMES and value not in get_args(_NAMES[key.name]):
                raise ValueError(
                    f"{key.name} must be one of {', '.join(get_args(_NAMES[key.name]))}; got {value!r}"
                )
            kinds = int if isinstance(key.default, int) else int | float
            if bounds and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise ValueError(f"{key.name} must be a number, like {key.default}; got {value!r}")
            if bounds and not (
                bounds.get("gt", -1) < value <= bounds["le"] and value >= bounds.get("ge", 0)
            ):
                least = f"above {bounds['gt']}" if "gt" in bounds else f"at least {bounds['ge']}"
                raise ValueError(
                    f"{key.name} must be {least} and at most {bounds['le']:g}; got {value!r}"
                )
        if self.loss_agg_mode != "seq-mean-token-mean":
            raise ValueError(
                f"loss_agg_mode must be 'seq-mean-token-mean', because TBPO has one ratio per response; "
                f"got {self.loss_agg_mode!r}"
            )

    @classmethod
    def of(cls, keys: object, **others: Any) -> TBPOConfig:
        """Return the config with the attributes of `keys` that are named in `KEYS`. The rest keep their defaults."""
        return cls(**{name: getattr(keys, name) for name in KEYS if hasattr(keys, name)}, **others)


KEYS = tuple(key.name for key in fields(TBPOConfig) if key.name != "loss_agg_mode")
"""The keys of TBPO in the section `actor` of a run's config. `loss_agg_mode` is a key of every loss."""
BINS = (1e-3, 1e-2, 1e-1)
"""Edges between classes of tokens, as probabilities, for `qarl.tbpo.tokens`."""
CLASSES = ("tail", "rare", "unlikely", "likely")
SIGNS = ("pos", "neg")
"""Signs of the advantage."""
POLICIES = ("", "now_")
"""In names of metrics: the policy whose probability chooses the class of a token, the old one or the current one."""
MAX_LOG_RATIO = 20.0
"""Log ratios are clipped to this maximum, so that no ratio exceeds e^20 = 4.9e8. There is no minimum, because the
exponential of a negative number cannot overflow."""
