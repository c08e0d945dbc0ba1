"""Seconds and memory of 256 rewards, as the local backend and as verl's reward workers call them.

Each row is a process of its own, which scores 256 responses twice: the first call starts the worker processes and
loads the function, the second is what a later step waits for. `local` calls `score_rows`; `verl` awaits
`qarl.verl.reward.score` for all of them at once, as verl's reward loop does in a Ray worker (Ray's own transport is not
in it). Memory is what the process and its workers have more than before the first reward, as proportional set size.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.proofs.harness import ROOT, Record

RESPONSES = 256
BYTES_PER_KB = 1024
REWARDS = {
    "1 ms of CPU": "busy",
    "100 ms of waiting": "slow",
    "math_verify": "math_verify",
}
FUNCTIONS = """
import time

def busy(data_source, solution_str, ground_truth, extra_info):
    end = time.perf_counter() + 0.001
    while time.perf_counter() < end:
        pass
    return 1.0

def slow(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.1)
    return 1.0
"""


class Case(NamedTuple):
    backend: str
    function: str
    """`reward.function`."""
    workers: int
    folder: str


def reward_seconds(record: Record, *, workers: tuple[int, ...] = (2, 8)) -> None:
    """Measure each reward in each backend with each number of worker processes."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rewards.py")
        file.write_text(FUNCTIONS, encoding="utf-8")
        for reward, function in REWARDS.items():
            spec = function if function == "math_verify" else f"{file}:{function}"
            for backend in BACKENDS:
                for count in workers:
                    name = f"{reward} | {backend} | {count} workers"
                    if record.wants(name):
                        record.add(name, _measured(Case(backend, spec, count, folder)))


def _measured(case: Case) -> dict[str, Any]:
    code = f"from benchmarks.proofs.reward_seconds import *; print(measure(Case(*{tuple(case)!r})))"
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    row: dict[str, Any] = json.loads(output.splitlines()[-1])
    return row


def measure(case: Case) -> str:
    """Score twice in this process. Return the seconds of both calls and the megabytes, as JSON."""
    import time

    score = BACKENDS[case.backend](case)
    rows = [
        {
            "data_source": "sums",
            "solution_str": rf"The answer is \boxed{{{number}}}.",
            "ground_truth": str(number),
            "extra_info": {"index": number},
        }
        for number in range(RESPONSES)
    ]
    before = megabytes()
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        scores = score(rows)
        seconds.append(time.perf_counter() - started)
        if scores != [1.0] * RESPONSES:
            raise ValueError(f"scores: {scores}")
    return json.dumps(
        {"first_s": seconds[0], "later_s": seconds[1], "memory_mb": megabytes() - before}
    )


def _local(case: Case) -> Callable[[list[dict[str, Any]]], list[float]]:
    from qarl.data.scoring import find_reward, score_rows

    reward = find_reward(case.function, case.workers, case.folder)
    return lambda rows: score_rows(reward, rows, [""] * len(rows), timeout_s=60)


def _verl(case: Case) -> Callable[[list[dict[str, Any]]], list[float]]:
    import asyncio

    from qarl.verl.reward import score

    one = partial(
        score, function=case.function, timeout_s=60, workers=case.workers, folder=case.folder
    )

    async def every(rows: Iterable[dict[str, Any]]) -> list[float]:
        results = await asyncio.gather(*(one(**row) for row in rows))
        return [result["score"] if isinstance(result, dict) else result for result in results]

    return lambda rows: asyncio.run(every(rows))


BACKENDS = {"local": _local, "verl": _verl}


def megabytes() -> float:
    """Return the proportional set size of this process and of all that it started."""
    import psutil

    process = psutil.Process()
    family = (process, *process.children(recursive=True))
    return sum(member.memory_full_info().pss for member in family) / BYTES_PER_KB**2
