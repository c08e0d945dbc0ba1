"""Starts the ranks of a program: one process each, as `python PROGRAM RANK PORT ARGUMENTS`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

from checkout import ROOT


def run_ranks(program: str, count: int, *arguments: str) -> None:
    """Run tests/support/`program` on `count` ranks. What a rank says is shown if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "support" / program)]
    options: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), str(port), *arguments], **options) for rank in range(count)]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(text[-1500:] for text in said)
