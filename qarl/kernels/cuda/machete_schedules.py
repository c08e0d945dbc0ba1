"""With which of Machete's schedules, and with how many rows, a product's sums over K stay whole.

Machete (vLLM's W4A16 kernel for Hopper) runs CUTLASS's stream-K scheduler with every schedule. If the last wave of
tiles would leave more than half of the GPU idle, the scheduler splits sums over K among thread blocks. How it splits
depends on the number of rows, so a row's bits do too. Nothing of this can be set from Python except the schedule by its
name. But a call with another tile, or with more rows, has another number of tiles. So for every weight and number of
rows there is a call whose sums are whole, and `plan` finds the fastest one by an estimate.

CUTLASS's rule is in `select_decomposition_mode` and `get_num_sk_tiles` of cutlass/gemm/kernel/tile_scheduler_params.h
(release 4.4.2, with which the vLLM of requirements/gpu.lock is built). With T tiles and 132 multiprocessors, each of
which takes one tile at a time, sums are whole if the last wave is full (T % 132 == 0) or at least half full (2 (T %
132) >= 132), or if there is little to split (at most 8 blocks of 64 of K).
`tests/unit/kernels/test_machete_schedules.py` compares `whole` with what CUTLASS's own header computes. That whole sums
have equal bits with any schedule was not tested on a GPU.

Machete multiplies weights [N, K] by rows [M, K]. A tile has `channels` of N and `rows` of M. This module has no torch.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import count
from typing import NamedTuple

PROCESSORS = 132
"""Multiprocessors of the GPUs for which the rule is written: H100 SXM, H200 and H800."""
CHANNELS = 128
"""N must be a multiple of this. `padded_channels` rounds up."""
BLOCK = 64
"""Columns of K that a tile adds in one step. K must be a multiple of it."""
_LEAST_SPLIT = 8
"""Sums of at most this many blocks of K are never split (CUTLASS's `min_iters_per_sk_unit_`)."""


class Schedule(NamedTuple):
    """One of the schedules that vLLM compiles for BF16 activations and int4 weights (machete/generate.py).

    `cluster`: tiles along N whose blocks run together, so their number is rounded up to a multiple of it.
    """

    channels: int
    rows: int
    cluster: int

    @property
    def name(self) -> str:
        """Return the name that `machete_mm` takes."""
        return f"{self.channels}x{self.rows}_{self.cluster}x1x1_TmaMI__TmaCoop_streamK"


SCHEDULES = (
    Schedule(128, 16, 1),
    Schedule(128, 32, 2),
    Schedule(128, 64, 2),
    Schedule(128, 128, 2),
    Schedule(128, 256, 2),
    Schedule(256, 16, 1),
    Schedule(256, 32, 2),
    Schedule(256, 64, 2),
    Schedule(256, 128, 2),
)
"""All of them. Of two with the same estimate the earlier one is taken."""


class Plan(NamedTuple):
    """A call of `machete_mm`: the name of the schedule, and the number of rows to pass, at least M."""

    schedule: str
    rows: int


def tiles(n: int, m: int, schedule: Schedule) -> int:
    """Return the number of tiles of a product with N = `n` and M = `m`."""
    channels = _round_up(-(-n // schedule.channels), schedule.cluster)
    return channels * -(-m // schedule.rows)


def whole(n: int, k: int, m: int, schedule: Schedule) -> bool:
    """Return whether CUTLASS keeps every sum over K in one thread block."""
    last_wave = tiles(n, m, schedule) % PROCESSORS
    return last_wave == 0 or 2 * last_wave >= PROCESSORS or -(-k // BLOCK) <= _LEAST_SPLIT


@lru_cache(maxsize=4096)
def plan(n: int, k: int, m: int) -> Plan:
    """Return the call for `m` rows, at least 1, and a weight [n, k] whose sums are whole.

    `n` must be a multiple of CHANNELS and `k` of BLOCK. The same arguments always give the same call.
    """
    calls = [
        (schedule, _whole_rows(n, k, m, schedule))
        for schedule in SCHEDULES
        if n % schedule.channels == 0
    ]
    schedule, rows = min(calls, key=lambda call: _microseconds(n, k, call[1], call[0]))
    return Plan(schedule.name, rows)


def padded_channels(n: int) -> int:
    """Return `n` rounded up to what Machete multiplies."""
    return _round_up(n, CHANNELS)


def _whole_rows(n: int, k: int, m: int, schedule: Schedule) -> int:
    """Return the least number of rows from `m` on for which sums are whole: `m`, or a multiple of the tile's rows.

    132 times the rows of a tile are always enough."""
    if whole(n, k, m, schedule):
        return m
    first = -(-m // schedule.rows)
    return next(
        number * schedule.rows
        for number in count(first + 1)
        if whole(n, k, number * schedule.rows, schedule)
    )


def _microseconds(n: int, k: int, m: int, schedule: Schedule) -> float:
    """Estimate the time of a call on an H200. Only the order of the estimates matters.

    Waves of tiles, each of which multiplies, dequantizes its weights once (which takes as long as 32 rows do), and
    starts and ends (1 us). A multiprocessor makes 5.1e6 flops in a microsecond. So 128 by 16 tiles of K = 4096 take
    11 us, where 10 were measured for `gate` of Qwen3-8B, and 128 by 256 tiles multiply at 600 TFLOP/s.
    """
    waves = -(-tiles(n, m, schedule) // PROCESSORS)
    flops = 2 * schedule.channels * (schedule.rows + 32) * k
    return waves * (flops / 5.1e6 + 1.0)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
