"""TBPO, the trust-band policy optimization loss of QaRL (arXiv 2604.07853). It depends only on torch.

Read `loss.py` first. `metrics.py` has the statistics, `config.py` the keys. Importing this package does not import
torch; the first use of the loss does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qarl.tbpo.config import TBPOConfig

if TYPE_CHECKING:
    from qarl.tbpo.loss import tbpo_loss
    from qarl.tbpo.metrics import after_first_metrics, reduce_metrics

__all__ = ["TBPOConfig", "after_first_metrics", "reduce_metrics", "tbpo_loss"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qarl.tbpo import loss, metrics

    return getattr(loss if name == "tbpo_loss" else metrics, name)
