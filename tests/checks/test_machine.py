"""Machines that cannot run a config: the NVIDIA driver, a compiler, GPUs that vLLM does not support, verl beside TRL.

No GPU is needed: the driver's file and the capability are given."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_helpers import config

from qarl.checks import machine as driver
from qarl.checks.machine import Machine, check_capability
from qarl.checks.run import CHECKS, check_dense, check_kernels, check_scheme
from qarl.errors import UserError
from qarl.rollout.engine_config import W4A8_ON_GPUS

CLOSED = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Sep  5 22:00:00 UTC 2024
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\nGCC version:  13.2.0\n"
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def of(text: str | None, cuda: str | None, sees_gpu: bool = False) -> None:
        monkeypatch.setattr(driver, "VERSION_FILE", tmp_path / "version")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
        if text is not None:
            (tmp_path / "version").write_text(text)

    return of


@pytest.mark.parametrize("sees_gpu", [True, False])
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("compiler", [True, False])
def test_triton_needs_headers_and_a_compiler(monkeypatch, tmp_path, sees_gpu, header, compiler) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    monkeypatch.setattr(driver.sysconfig, "get_default_scheme", lambda: "posix_local")  # Debian's own Python
    paths = {"posix_prefix": tmp_path}
    monkeypatch.setattr(driver.sysconfig, "get_path", lambda name, scheme: str(paths[scheme]))
    monkeypatch.setattr(driver.shutil, "which", lambda name: "/usr/bin/gcc" if compiler else None)
    monkeypatch.delenv("CC", raising=False)
    if header:
        (tmp_path / "Python.h").touch()
    if not sees_gpu or (header and compiler):
        return driver.check_compiler()
    with pytest.raises(UserError) as error:
        driver.check_compiler()
    assert ("Python.h" in str(error.value), "gcc or clang" in str(error.value)) == (not header, not compiler)


@pytest.mark.parametrize("form", [CLOSED, OPEN])
@pytest.mark.parametrize(
    ("version", "cuda", "refused"),
    [("550.54.15", "13.0", True), ("579.99", "13.0", True), ("580.65.06", "13.0", False), ("590.1", "13.0", False),
     ("550.54.15", "12.9", False), ("515.105.01", "12.4", True)],
)  # fmt: skip
def test_a_driver_that_is_too_old_is_refused(machine, form: str, version: str, cuda: str, refused: bool) -> None:
    machine(form.format(version), cuda)
    assert driver.driver_version() == version
    if not refused:
        driver.check_driver()
        return
    needed = {"13": 580, "12": 525}[cuda[:2]]
    with pytest.raises(
        UserError, match=rf"(?s)driver {version} is too old.*CUDA {cuda} needs driver {needed}.*R{needed}"
    ):
        driver.check_driver()


def gpu(capability: int, here: bool = False) -> Machine:
    return Machine("cuda", "a GPU", here, capability)


def test_training_refuses_what_gpus_do_not_compute(tmp_path, monkeypatch):
    fp8 = config(tmp_path, "quant.scheme=fp8")
    with pytest.raises(UserError, match=r"8\.6 is too low for quant\.scheme=fp8"):
        check_scheme(fp8, gpu(86))
    check_scheme(fp8, gpu(89))
    with pytest.raises(UserError) as error:
        check_scheme(config(tmp_path, "quant.scheme=w4a8"), gpu(90))
    assert W4A8_ON_GPUS in str(error.value)
    for here in (True, False):
        for scheme, kernels, words in (("w4a8", "qarl", W4A8_ON_GPUS), ("w4a16", "dequantized", "only on a CPU")):
            with pytest.raises(UserError) as error:
                run = config(tmp_path, f"quant.scheme={scheme}", f"quant.kernels={kernels}")
                list(check_kernels(run, gpu(90, here)))
            assert words in str(error.value)
    with pytest.raises(UserError, match="no int8 products"):
        check_capability("w8a8", "engine", 100)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "Other,CutlassInt8ScaledMMLinearKernel")
    check_capability("w8a8", "engine", 100)


@pytest.mark.parametrize(("scheme", "experts", "device", "refused"), [
    ("w8a8", 8, "cuda", True), ("w8a8", 0, "cuda", False), ("w8a8", 8, "cpu", False), ("fp8", 8, "cuda", False),
])  # fmt: skip
def test_training_refuses_experts_in_w8a8_on_gpus(tmp_path, scheme, experts, device, refused):
    run: Any = SimpleNamespace(
        config=config(tmp_path, f"quant.scheme={scheme}", "rollout.enforce_eager=true"),
        hf_config=SimpleNamespace(num_experts=experts),
        machine=Machine(device, "", here=True),
    )
    (check,) = (check for check in CHECKS if check.name == "vLLM can run experts" and check.applies(run))
    if refused:
        with pytest.raises(UserError, match="no int8 products for experts on GPUs"):
            list(check.findings(run))
    else:
        list(check.findings(run))


def test_own_kernels_are_for_dense_models(tmp_path: Path) -> None:
    run = config(tmp_path, "quant.kernels=dequantized")
    check_dense(run, SimpleNamespace(num_experts=None))
    with pytest.raises(UserError, match=r"(?s)dequantized does not support a mixture of experts.*dense"):
        check_dense(run, SimpleNamespace(num_experts=4))


@pytest.mark.parametrize(
    ("version", "module", "refused"), [("1.16.0", "grpo", True), ("1.12.0", "ppo", False), ("0.12.0", None, False)]
)
def test_a_trl_without_the_class_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, module: str | None, refused: bool
) -> None:
    package = tmp_path / "trl"
    (package / "experimental" / module if module else package).mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / f"trl-{version}.dist-info").mkdir()
    (tmp_path / f"trl-{version}.dist-info" / "METADATA").write_text(f"Name: trl\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.metadata.version("trl") == version
    if not refused:
        driver.check_no_new_trl()
        return
    with pytest.raises(UserError, match=r"does not run beside TRL 1\.16\.0"):
        driver.check_no_new_trl()
