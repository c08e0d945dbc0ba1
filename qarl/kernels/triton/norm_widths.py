"""The widths of the rows that QaRL's RMSNorm normalises (norms.py). Checks ask on machines without Triton, too."""

from __future__ import annotations

VECTOR = 8
"""Elements of a load of 16 bytes. Widths and strides are multiples of it."""
LARGEST_WIDTH = 8192
"""Elements of the longest row: a program holds a whole row in its registers."""


def unavailable(width: int) -> str | None:
    """Return why there is no norm for rows of `width` elements, or None if there is."""
    if width % VECTOR == 0 and 0 < width <= LARGEST_WIDTH:
        return None
    return (
        f"normalises rows of a multiple of {VECTOR} elements, up to {LARGEST_WIDTH}, not of {width}"
    )
