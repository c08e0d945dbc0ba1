"""vLLM's CUDA kernels without a GPU: which of them vLLM's own chooser gives. On a GPU tests/gpu runs them."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from qarl.errors import UserError
from qarl.kernels.cuda import vllm_ops as vllm_cuda
from qarl.kernels.registry import choose_linear_kernel
from qarl.process import configure_vllm_process

configure_vllm_process()
LINEAR = "vllm.model_executor.kernels.linear"
MARLIN = "vllm.model_executor.layers.quantization.utils.marlin_utils"


@pytest.fixture
def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's chooser on a GPU of a given capability, as it would see it."""

    def pretend(major: int, minor: int) -> None:
        linear = importlib.import_module(LINEAR)
        from vllm.platforms.interface import DeviceCapability

        capability = DeviceCapability(major, minor)
        platform = SimpleNamespace(
            _enum=importlib.import_module("vllm.platforms").PlatformEnum.CUDA,
            get_device_capability=lambda *args: capability,
            is_device_capability=lambda number: number == major * 10 + minor,
            has_device_capability=lambda number: major * 10 + minor >= number,
            is_cuda=lambda: True,
            is_cuda_alike=lambda: True,
            is_cpu=lambda: False,
            is_rocm=lambda: False,
            is_xpu=lambda: False,
        )
        modules = [linear, importlib.import_module(MARLIN)]
        modules += [importlib.import_module(f"{LINEAR}.mixed_precision.{name}") for name in ("machete", "marlin")]
        for module in modules:
            monkeypatch.setattr(module, "current_platform", platform)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(vllm_cuda, "_unusable", lambda operator: None)
        vllm_cuda._not_the_engines.cache_clear()

    yield pretend
    vllm_cuda._not_the_engines.cache_clear()


CHOICES = [
    ((9, 0), (2048, 1536), 128, "vllm_machete"),
    ((9, 0), (2048, 1536), 64, "vllm_machete"),
    ((9, 0), (2048, 1536), 32, "vllm_marlin"),
    ((9, 0), (64, 1536), 128, "vllm_marlin"),
    ((9, 0), (192, 96), 32, "vllm_marlin"),
    ((8, 0), (2048, 1536), 128, "vllm_marlin"),
    ((10, 0), (2048, 1536), 128, "vllm_marlin"),
]


@pytest.mark.parametrize(("capability", "shape", "group_size", "expected"), CHOICES)
def test_w4a16_is_what_vllm_would_choose(
    pretend_cuda: Any, capability: tuple[int, int], shape: tuple[int, int], group_size: int, expected: str
) -> None:
    pretend_cuda(*capability)
    device = torch.device("cuda", 0)
    assert choose_linear_kernel("w4a16", device, shape, group_size=group_size).kernel.name == expected
    linear = importlib.import_module(LINEAR)
    layer = linear.MPLinearLayerConfig(
        shape[::-1], shape[::-1], vllm_cuda.uint4b8(), torch.bfloat16, group_size, False, False
    )
    theirs = {"vllm_machete": "MacheteLinearKernel", "vllm_marlin": "MarlinLinearKernel"}[expected]
    assert linear.choose_mp_linear_kernel(layer).__name__ == theirs


def test_what_vllm_disables_is_not_chosen(pretend_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(9, 0)
    device, shape = torch.device("cuda", 0), (2048, 1536)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "MacheteLinearKernel,CutlassFP8ScaledMMLinearKernel")
    choice = choose_linear_kernel("w4a16", device, shape, group_size=128)
    assert choice.kernel.name == "vllm_marlin"
    assert choice.passed_over[-1] == "vllm_machete: here vLLM itself runs MarlinLinearKernel"
    assert "VLLM_DISABLED_KERNELS" in (vllm_cuda.VllmCutlassFP8Linear.unavailable("fp8", device, shape) or "")


@pytest.mark.parametrize(
    ("scheme", "capability", "shape", "expected"),
    [
        ("w8a8", (9, 0), (2048, 1536), "vllm_cutlass_int8"),
        ("w8a8", (8, 0), (2048, 1536), "vllm_cutlass_int8"),
        ("w8a8", (10, 0), (2048, 1536), None),
        ("w8a8", (9, 0), (2040, 1536), None),
        ("fp8", (9, 0), (2048, 1536), "vllm_cutlass_fp8"),
        ("fp8", (8, 0), (2048, 1536), None),
    ],
)
def test_eight_bits(
    pretend_cuda: Any, scheme: str, capability: tuple[int, int], shape: tuple[int, int], expected: str | None
) -> None:
    pretend_cuda(*capability)
    chosen = choose_linear_kernel(scheme, torch.device("cuda", 0), shape).kernel.name
    assert chosen == expected if expected else not chosen.startswith("vllm")


def test_groups_that_vllm_cannot_multiply_go_to_others(pretend_cuda: Any) -> None:
    pretend_cuda(9, 0)
    choice = choose_linear_kernel("w4a16", torch.device("cuda", 0), (2048, 1536), group_size=256)
    assert not choice.kernel.name.startswith("vllm")
    assert "vllm_marlin: supports group sizes 32, 64, 128, not 256" in choice.passed_over
    with pytest.raises(UserError, match="not 256"):
        choose_linear_kernel("w4a16", torch.device("cuda", 0), (2048, 1536), group_size=256, force="vllm_machete")
