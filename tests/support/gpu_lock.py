"""The libraries of requirements/gpu.lock on a machine without a GPU, for tests/gpu_stack (docs/lookup/results/gpu.md).

vLLM's C libraries need libcuda.so.1, which comes with NVIDIA's driver. Without the driver, a stub takes its place: a
library with the same name whose functions all return CUDA_ERROR_NO_DEVICE. With it, torch and vLLM load completely and
find no GPU. `cuda_of` then replaces vLLM's platform by one that answers as a GPU of a given compute capability.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkout import ROOT

NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE of cuda.h."""
CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0))
COMPUTE_UNITS = {(8, 0): 108, (8, 9): 142, (9, 0): 132, (10, 0): 148}
"""Multiprocessors of an A100, L40S, H100 and B200."""


def locked_vllm() -> str:
    lock = (ROOT / "requirements" / "gpu.lock").read_text(encoding="utf-8")
    match = re.search(r"^vllm==(.+)$", lock, re.MULTILINE)
    assert match, "requirements/gpu.lock has no vllm"
    return match[1]


def why_not() -> str | None:
    """Return why this environment is not that of the GPU lock, or None if it is."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    return (
        None
        if version == locked_vllm()
        else f"needs vllm {locked_vllm()}, not {version}: run make test-gpu-stack"
    )


def required() -> None:
    """Skip the test file that calls this first, unless the environment is that of the GPU lock. Load libcuda."""
    if reason := why_not():
        pytest.skip(reason, allow_module_level=True)
    load_libcuda()


@cache
def load_libcuda() -> bool:
    """Load the driver's libcuda, or else the stub, for all libraries of this process. Return whether it is the stub."""
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return False
    except OSError:
        ctypes.CDLL(str(_built()), mode=ctypes.RTLD_GLOBAL)
        return True


def _built() -> Path:
    """Compile the stub into the virtual environment, once, with every function of the driver that vLLM links to."""
    stub = Path(sys.prefix) / "libcuda_stub" / "libcuda.so.1"
    if not stub.exists():
        stub.parent.mkdir(exist_ok=True)
        source = "".join(
            f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in driver_functions()
        )
        options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        made = stub.with_name(f"libcuda.{id(stub)}.so")  # a second process may be building it too
        subprocess.run(
            ["gcc", *options, "-x", "c", "-", "-o", str(made)], input=source, text=True, check=True
        )
        made.rename(stub)
    return stub


def driver_functions() -> list[str]:
    spec = importlib.util.find_spec("vllm")
    assert spec and spec.submodule_search_locations
    libraries = sorted(Path(spec.submodule_search_locations[0]).rglob("*.so"))
    command = ["nm", "--dynamic", "--undefined-only", *map(str, libraries)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted(set(re.findall(r"\bcu[A-Z]\w+", symbols)))


@cache
def _platform() -> Any:
    """Make vLLM's platform a CUDA platform, for the whole process. Call this before vLLM's layers are imported."""
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Pretended(CudaPlatformBase):
        capability = (9, 0)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*cls.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return f"a GPU of capability {cls.capability}"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return False

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return COMPUTE_UNITS[cls.capability]

    setattr(vllm.platforms, "_current_platform", Pretended())  # noqa: B010 (the module computes its attributes)
    importlib.import_module("vllm._custom_ops")
    return Pretended


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Let vLLM and QaRL see a GPU of `capability` until the end of the test."""
    platform = _platform()
    monkeypatch.setattr(platform, "capability", capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    properties = SimpleNamespace(
        name=platform.get_device_name(),
        total_memory=platform.get_device_total_memory(),
        multi_processor_count=COMPUTE_UNITS[capability],
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
