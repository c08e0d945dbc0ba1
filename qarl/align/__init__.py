"""The trainer's norms, rotary embedding and attention, computed with the rollout engine's arithmetic."""

from qarl.align.levels import AlignReport, align_model

__all__ = ["AlignReport", "align_model"]
