"""SIGTERM with a real Ray, whose own handlers would abort the program before its last files are written."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("verl")
pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]

PROGRAM = """
import os, signal, sys, threading, time
import ray
from qarl.verl.interrupts import AfterStart, answered_interrupt

@ray.remote
class Runner:
    def run(self):
        time.sleep(60)

try:
    with answered_interrupt(lambda: "it resumes after step 12") as again:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        runner = AfterStart(Runner, again if sys.argv[1] == "running" else int).remote()
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        ray.get(runner.run.remote())
except KeyboardInterrupt:
    ray.shutdown()
    time.sleep(5)  # Ray's native handler aborts after three seconds
    print("wrote the last files")
"""


@pytest.mark.parametrize("when", ["running", "starting"])
def test_sigterm_leaves_time_for_the_last_files(when: str) -> None:
    """`starting`: before Ray's handlers are replaced."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, when],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("wrote the last files\n")
    assert ended.stderr.count("stopping verl now") == 1
    assert "it resumes after step 12" in ended.stderr
    assert ("*** SIGTERM received" in ended.stderr) == (when == "starting")
