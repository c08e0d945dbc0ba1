"""How fast a linear kernel multiplies: what each says of itself, for `qarl bench plan`.

Speeds are of Hopper, as shares of the rate in NVIDIA's data sheet. One H200 measured them on two layers of Qwen3-8B
(`RESULTS`); a test compares them with the file. Only numbers of rows from 512 on are here: the file's smaller figures
contain the benchmark's own time (docs/lookup/results/gpu.md#small-figures-of-that-file). A product of few rows takes as
long as its bytes, whatever the kernel, as far as a roofline goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

RESULTS = "gpu_check_2026-11-27.json"


class Share(NamedTuple):
    """The share of the data sheet's rate that a product of `rows` rows reaches."""

    rows: int
    share: float


@dataclass(frozen=True)
class Speed:
    """The speed of a kernel's products.

    rate      the rate of the data sheet that the shares are of: bf16, int8 or fp8
    measured  name of the kernel in `RESULTS` whose figures these are. Of a kernel that has not run on a GPU it is
              another one, which does the same work
    shares    by number of rows
    """

    rate: str
    measured: str
    shares: tuple[Share, ...]


def on_hopper(rate: str, measured: str, few: float, many: float, most: float) -> Speed:
    """Return a speed with shares at 512, 4096 and 16384 rows."""
    return Speed(rate, measured, (Share(512, few), Share(4096, many), Share(16384, most)))


CUBLAS = on_hopper("bf16", "bf16", 0.734, 0.805, 0.759)
"""The BF16 product of PyTorch, which vLLM calls, too."""
