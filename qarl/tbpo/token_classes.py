"""Classes of tokens by probability, for the statistics of `qarl.tbpo.tokens`. This module needs no torch."""

from __future__ import annotations

BINS = (1e-3, 1e-2, 1e-1)
"""Edges between the classes, as probabilities under the old policy."""
CLASSES = ("tail", "rare", "unlikely", "likely")
SIGNS = ("pos", "neg")
"""Signs of the advantage."""
