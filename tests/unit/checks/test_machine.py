"""Machines that cannot run a config: the NVIDIA driver, a compiler, GPUs that vLLM does not support, verl beside TRL.

No GPU is needed: the driver's file and the capability are given."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import config

from qarl.checks import machine as driver
from qarl.checks.machine import Machine, check_capability
from qarl.checks.run import check_experts, check_kernels, check_scheme
from qarl.errors import UserError
from qarl.rollout.engine_config import W4A8_ON_GPUS

CLOSED = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Sep  5 22:00:00 UTC 2024
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\nGCC version:  13.2.0\n"
)


@pytest.mark.parametrize(("header", "compiler"), [(True, True), (True, False), (False, True)])
def test_triton_needs_headers_and_a_compiler(monkeypatch, tmp_path, header, compiler) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(driver.sysconfig, "get_default_scheme", lambda: "posix_local")  # Debian's own Python
    paths = {"posix_prefix": tmp_path}
    monkeypatch.setattr(driver.sysconfig, "get_path", lambda name, scheme: str(paths[scheme]))
    monkeypatch.setattr(driver.shutil, "which", lambda name: "/usr/bin/gcc" if compiler else None)
    monkeypatch.delenv("CC", raising=False)
    if header:
        (tmp_path / "Python.h").touch()
    if header and compiler:
        return driver.check_compiler()
    with pytest.raises(UserError, match=r"gcc or clang" if header else r"Python\.h"):
        driver.check_compiler()


@pytest.mark.parametrize(
    ("form", "version", "cuda", "refused"),
    [(CLOSED, "550.54.15", "13.0", True), (OPEN, "579.99", "13.0", True), (OPEN, "580.65.06", "13.0", False),
     (CLOSED, "550.54.15", "12.9", False), (CLOSED, "515.105.01", "12.4", True)],
)  # fmt: skip
def test_a_driver_that_is_too_old_is_refused(monkeypatch, tmp_path, form, version, cuda, refused) -> None:
    monkeypatch.setattr(driver, "VERSION_FILE", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "version").write_text(form.format(version))
    assert driver.driver_version() == version
    if not refused:
        return driver.check_driver()
    needed = {"13": 580, "12": 525}[cuda[:2]]
    with pytest.raises(UserError, match=rf"(?s)driver {version} is too old.*CUDA {cuda} needs driver {needed}"):
        driver.check_driver()


def gpu(capability: int) -> Machine:
    return Machine("cuda", "a GPU", False, capability)


def test_training_refuses_what_gpus_do_not_compute(tmp_path, monkeypatch):
    fp8 = config(tmp_path, "quant.scheme=fp8")
    with pytest.raises(UserError, match=r"8\.6 is too low for quant\.scheme=fp8"):
        check_scheme(fp8, gpu(86))
    check_scheme(fp8, gpu(89))
    with pytest.raises(UserError) as error:
        check_scheme(config(tmp_path, "quant.scheme=w4a8"), gpu(90))
    assert W4A8_ON_GPUS in str(error.value)
    for scheme, kernels, words in (("w4a8", "qarl", W4A8_ON_GPUS), ("w4a16", "dequantized", "only on a CPU")):
        with pytest.raises(UserError) as error:
            list(check_kernels(config(tmp_path, f"quant.scheme={scheme}", f"quant.kernels={kernels}"), gpu(90)))
        assert words in str(error.value)
    with pytest.raises(UserError, match="no int8 products"):
        check_capability("w8a8", "engine", 100)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "Other,CutlassInt8ScaledMMLinearKernel")
    check_capability("w8a8", "engine", 100)


def test_experts_that_cannot_run_are_refused(tmp_path: Path) -> None:
    experts, dense = SimpleNamespace(num_experts=8), SimpleNamespace(num_experts=None)
    w8a8, own = config(tmp_path, "quant.scheme=w8a8"), config(tmp_path, "quant.kernels=dequantized")
    for refused, words in ((w8a8, "no int8 products for experts on GPUs"), (own, "dequantized does not support a mix")):
        with pytest.raises(UserError, match=words):
            check_experts(refused, gpu(90), experts)
        check_experts(refused, gpu(90), dense)
    check_experts(config(tmp_path, "quant.scheme=fp8"), gpu(90), experts)


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
