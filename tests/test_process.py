"""The process set-up, each in a separate process: malloc's settings stay for good."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys

import pytest

from qarl.process import VLLM_NOISE, configure_vllm_process

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


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is told by glibc's mallopt")
def test_freed_memory_is_not_faulted_in_again() -> None:
    pages = 36 * 2**26 // os.sysconf("SC_PAGE_SIZE")
    left, faulted = second_time("leave")
    kept, faults = second_time("keep")
    assert not left and faulted > pages // 512  # also where the kernel gives huge pages
    assert kept and faults < faulted // 8


@pytest.mark.slow
def test_what_the_user_told_malloc_stays() -> None:
    kept, faults = second_time("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept and faults > 0


LOGGED = """
import json, logging, os, sys
from qarl.process import configure_vllm_process
from qarl.rollout.engine import SamplingConfig, sampling_params

sampling_params(SamplingConfig(4))  # the first call of a run's set-up that imports vLLM
configure_vllm_process()
import vllm.logger
from vllm import SamplingParams

for name, text in json.loads(sys.argv[1]):
    logging.getLogger(name).warning("%s", text)
SamplingParams(temperature=0.005)
print(os.environ["VLLM_LOGGING_LEVEL"])
"""


def logged() -> tuple[str, str]:
    """vLLM's level, and what a process of ours shows of its known noise and of one warning that matters."""
    noise = [(name, f"{start} and so on") for name, starts in VLLM_NOISE.items() for start in starts]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    command = [sys.executable, "-c", LOGGED, json.dumps(noise)]
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1], done.stdout + done.stderr


@pytest.mark.vllm
def test_vllms_warnings_that_change_results_are_seen_and_its_noise_is_not() -> None:
    level, text = logged()
    assert level == "WARNING" and "INFO" not in text
    assert text.count("We have maxed it out to 0.01") == 1
    assert [start for starts in VLLM_NOISE.values() for start in starts if start in text] == []


@pytest.mark.parametrize("level", ["ERROR", "WARNING"])
def test_a_logging_level_that_the_user_set_stays(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VLLM_NOISE:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    monkeypatch.delenv("QARL_CHOSE_VLLM_LOGGING_LEVEL", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    configure_vllm_process()
    assert os.environ["VLLM_LOGGING_LEVEL"] == level
    assert not any(logging.getLogger(name).filters for name in VLLM_NOISE)
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    configure_vllm_process()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "WARNING"
    for name in VLLM_NOISE:  # a process that this one starts has these variables, and no filter yet
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    configure_vllm_process()
    assert all(logging.getLogger(name).filters for name in VLLM_NOISE)
