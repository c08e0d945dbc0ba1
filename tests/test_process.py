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
    for _ in range(4):
        torch.ones(2**24)  # 64 MiB, beyond what glibc keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(kept, faults())
"""


def second_time(*arguments: str, **environment: str) -> tuple[bool, int]:
    command = [sys.executable, "-c", FAULTS, *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is told by glibc's mallopt")
def test_freed_memory_is_not_faulted_in_again() -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    assert second_time("leave") > (False, 4 * 2**26 // page // 512)  # also where the kernel gives huge pages
    kept, faults = second_time("keep")
    assert kept and faults < 16


def test_what_the_user_told_malloc_stays() -> None:
    kept, faults = second_time("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept and faults > 0
