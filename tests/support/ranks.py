"""Runs programs of this folder, each rank in a fork of one process that has imported torch, vLLM and verl.

These imports take longer than most of the programs. The fork server is Python's own (`multiprocessing`). It ends with
the process of the tests and its programs. A program finds vLLM and verl imported, whether it needs them or not.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
import warnings
from functools import cache
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from unittest.mock import patch

from checkout import ROOT

from qarl.process import VLLM_ENVIRONMENT

IMPORTED = ["qarl.verl.fsdp_engine", "verl.workers.engine", "verl.workers.engine_workers", "vllm"]
ENVIRONMENT = VLLM_ENVIRONMENT | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "VERL_PLATFORM": "cpu",
}
RAYS = {"RAY_RAYLET_PID": "1", "RAY_JOB_ID": "01000000"}
"""Variables that Ray sets in its workers."""


def run_ranks(
    program: str, count: int, *arguments: object, timeout: float = 580, **variables: str
) -> str:
    """Run `program` on `count` ranks with `variables` and those of torch.distributed. Return what the first printed.
    What all printed is shown if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": "0",
    }
    until = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(count)]
        ranks: list[ForkServerProcess] = []
        try:
            ranks += (
                fork(program, log, *arguments, **variables, RANK=str(rank))
                for rank, log in enumerate(logs)
            )
            while not any(rank.exitcode for rank in ranks) and any(
                rank.exitcode is None for rank in ranks
            ):
                connection.wait([rank.sentinel for rank in ranks if rank.exitcode is None], timeout)
                if time.monotonic() > until:
                    break
        finally:
            for rank in ranks:
                rank.kill()
        printed = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    assert all(rank.exitcode == 0 for rank in ranks), "\n".join(
        text[-4000 // count :] for text in printed
    )
    return printed[0]


def fork(program: str, log: Path, *arguments: object, **variables: str) -> ForkServerProcess:
    """Start `program`, which prints to `log`. It is ended at the latest with this process."""
    words = list(map(str, arguments))
    process = _forking().Process(
        target=_run, args=(program, words, ENVIRONMENT | variables, log), daemon=True
    )
    process.start()
    return process


@cache
def _forking() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return context


def _run(program: str, arguments: list[str], variables: dict[str, str], log: Path) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    gc.freeze()  # the objects of all modules, which make a collection of garbage slow
    assert sys.modules.keys() >= set(IMPORTED), "the fork server could not import what it should"
    warnings.simplefilter("ignore")
    os.environ |= variables
    sys.argv = [program, *arguments]
    runpy.run_path(str(ROOT / "tests" / "support" / program), run_name="__main__")
