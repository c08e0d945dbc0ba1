"""TBPO, the trust-band policy optimization loss of QaRL (arXiv 2604.07853), as a drop-in that depends on torch alone.

Read `ratios.py` first (what is compared with what), then `loss.py` (what is done with it). The keys are in `config.py`,
which needs no torch: the loss itself is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qarl.tbpo.config import TBPOConfig

if TYPE_CHECKING:
    from qarl.tbpo.loss import reduce_metrics, tbpo_loss

__all__ = ["TBPOConfig", "reduce_metrics", "tbpo_loss"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qarl.tbpo import loss

    return getattr(loss, name)
