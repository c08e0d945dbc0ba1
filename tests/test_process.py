"""The process set-up, each in a process of its own: malloc's settings stay for good."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from qarl.process import keep_freed_memory

kept = sys.argv[1] == "keep" and keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(2**24) for _ in range(36)]  # 64 MiB each, beyond what glibc keeps by itself, and 2.25 GiB in all
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(4):  # the heap grows until blocks fit into what earlier ones left
    faults()
print(kept, faults())
"""


def second_time(*arguments: str, **environment: str) -> tuple[bool, int]:
    command = [sys.executable, "-c", FAULTS, *arguments]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))}
    done = subprocess.run(command, env={**inherited, **environment}, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is told by glibc's mallopt")
def test_freed_memory_is_not_faulted_in_again() -> None:
    pages = 36 * 2**26 // os.sysconf("SC_PAGE_SIZE")
    left, faulted = second_time("leave")
    kept, faults = second_time("keep")
    assert not left and faulted > pages // 512  # also where the kernel gives huge pages
    assert kept and faults < faulted // 8


def test_what_the_user_told_malloc_stays() -> None:
    kept, faults = second_time("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept and faults > 0
