"""The classes of tokens by probability for which `qarl.tbpo.tokens` collects statistics. This module needs no torch."""

from __future__ import annotations

BINS = (1e-3, 1e-2, 1e-1)
"""Edges between the classes, as probabilities under the old policy."""
CLASSES = ("p_below_1e-3", "p_below_1e-2", "p_below_1e-1", "p_below_1")
SIGNS = ("pos", "neg")
"""Signs of the advantage."""
