"""The histogram of w, the mismatch weight of a response before TBPO's cap (arXiv 2604.07853, figure 4d)."""

from __future__ import annotations

import math

W_BINS = {
    "mismatch/w_to_50": 0.5,
    "mismatch/w_to_80": 0.8,
    "mismatch/w_to_95": 0.95,
    "mismatch/w_to_99": 0.99,
    "mismatch/w_to_101": 1.01,
    "mismatch/w_to_105": 1.05,
    "mismatch/w_to_125": 1.25,
    "mismatch/w_to_200": 2.0,
    "mismatch/w_above_200": math.inf,
}
"""Maps the metric of each bin to the bin's upper edge. A bin begins at the edge before it."""
