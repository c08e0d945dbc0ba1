"""TBPO, the trust-band policy optimization loss of QaRL (arXiv 2604.07853), as a drop-in that depends on torch alone.

Read `ratios.py` first (what is compared with what), then `loss.py` (what is done with it).
"""

from qarl.tbpo.loss import TBPOConfig, reduce_metrics, tbpo_loss

__all__ = ["TBPOConfig", "reduce_metrics", "tbpo_loss"]
