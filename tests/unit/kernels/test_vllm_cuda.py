"""vLLM's CUDA kernels for linears and experts without a GPU: which of them vLLM's own chooser gives.

On a GPU tests/gpu runs them.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from qarl.errors import UserError
from qarl.kernels.base import ExpertsShape
from qarl.kernels.cuda import vllm_experts
from qarl.kernels.cuda import vllm_linears as vllm_cuda
from qarl.kernels.registry import choose_experts_kernel, choose_linear_kernel
from qarl.process import configure_vllm_process
from qarl.schemes import get_scheme
from qarl.schemes.kernel_choice import KernelChoice

configure_vllm_process()
MOE = "vllm.model_executor.layers.fused_moe"
LINEAR = "vllm.model_executor.kernels.linear"
IMPORTED = (
    *(
        f"{MOE}.{name}"
        for name in ("config", "experts.triton_moe", "experts.marlin_moe", "oracle.fp8")
    ),
    *(f"{LINEAR}.mixed_precision.{name}" for name in ("machete", "marlin")),
    f"{vllm_cuda._COMPRESSED_TENSORS}.compressed_tensors",
)
"""Modules of vLLM that a CPU build must import before it is told of a GPU."""
QWEN3_30B = ExpertsShape(experts=128, top_k=8, hidden=2048, intermediate=768)
GPU = torch.device("cuda", 0)


@pytest.fixture
def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes vLLM's platform that of a GPU of a given capability."""
    caches = (vllm_cuda._not_the_engines, vllm_cuda.chosen_experts_kernel)

    def pretend(major: int, minor: int) -> None:
        for name in IMPORTED:
            importlib.import_module(name)
        from vllm.platforms import PlatformEnum, current_platform
        from vllm.platforms.interface import DeviceCapability

        capability = DeviceCapability(major, minor)
        platform = type(current_platform)
        monkeypatch.setattr(platform, "_enum", PlatformEnum.CUDA)
        monkeypatch.setattr(
            platform, "get_device_capability", classmethod(lambda cls, device_id=0: capability)
        )
        monkeypatch.setattr(
            platform, "supports_fp8", classmethod(lambda cls: (major, minor) >= (8, 9))
        )
        cutlass = importlib.import_module(f"{MOE}.experts.cutlass_moe")
        monkeypatch.setattr(cutlass, "cutlass_group_gemm_supported", lambda: major in (9, 10))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(vllm_cuda, "_unusable", lambda operator: None)
        monkeypatch.setattr(vllm_cuda, "_unusable_moe", lambda: None)
        for cache in caches:
            cache.cache_clear()

    yield pretend
    for cache in caches:
        cache.cache_clear()


BIG = (2048, 1536)
LINEARS = [
    ("w4a16", (9, 0), BIG, 128, "vllm_machete"),
    ("w4a16", (9, 0), BIG, 64, "vllm_machete"),
    ("w4a16", (9, 0), BIG, 32, "vllm_marlin"),
    ("w4a16", (9, 0), (64, 1536), 128, "vllm_marlin"),
    ("w4a16", (9, 0), (192, 96), 32, "vllm_marlin"),
    ("w4a16", (8, 0), BIG, 128, "vllm_marlin"),
    ("w4a16", (10, 0), BIG, 128, "vllm_marlin"),
    ("w8a8", (9, 0), BIG, None, "vllm_cutlass_int8"),
    ("w8a8", (8, 0), BIG, None, "vllm_cutlass_int8"),
    ("w8a8", (10, 0), BIG, None, "triton"),
    ("w8a8", (9, 0), (2040, 1536), None, "triton"),
    ("fp8", (9, 0), BIG, None, "vllm_cutlass_fp8"),
    ("fp8", (8, 0), BIG, None, "reference"),
]
MIXED = {"vllm_machete": "MacheteLinearKernel", "vllm_marlin": "MarlinLinearKernel"}


@pytest.mark.parametrize(("scheme", "capability", "shape", "group_size", "expected"), LINEARS)
def test_linears_are_what_vllm_would_choose(
    pretend_cuda: Any,
    scheme: str,
    capability: tuple[int, int],
    shape: tuple[int, int],
    group_size: Any,
    expected: str,
) -> None:
    pretend_cuda(*capability)
    assert (
        choose_linear_kernel(get_scheme(scheme, group_size or 128), GPU, shape).kernel.name
        == expected
    )
    if scheme == "w4a16":
        linear = importlib.import_module(LINEAR)
        sizes = shape[::-1], shape[::-1]
        layer = linear.MPLinearLayerConfig(
            *sizes, vllm_cuda.uint4b8(), torch.bfloat16, group_size, False, False
        )
        assert linear.choose_mp_linear_kernel(layer).__name__ == MIXED[expected]


def test_what_vllm_disables_is_not_chosen(
    pretend_cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cuda(9, 0)
    monkeypatch.setenv(
        "VLLM_DISABLED_KERNELS", "MacheteLinearKernel,CutlassFP8ScaledMMLinearKernel"
    )
    choice = choose_linear_kernel(get_scheme("w4a16", 128), GPU, BIG)
    assert choice.kernel.name == "vllm_marlin"
    assert choice.passed_over[-1] == "vllm_machete: here vLLM itself runs MarlinLinearKernel"
    assert "VLLM_DISABLED_KERNELS" in (vllm_cuda.VllmCutlassFP8Linear.unavailable(GPU, BIG) or "")


@pytest.mark.parametrize(
    ("capability", "processors", "shape", "group_size", "words"),
    [
        ((9, 0), 132, (192, 1536), 64, None),
        ((9, 0), 132, BIG, 32, "supports group sizes 64, 128, not 32"),
        ((9, 0), 132, (2048, 1440), 64, "needs K in multiples of 64"),
        ((9, 0), 114, BIG, 128, r"for 132 multiprocessors \(H100 SXM, H200\), not 114"),
        ((8, 0), 108, BIG, 128, "needs compute capability 9.0"),
        ((10, 0), 148, BIG, 128, "runs on compute capability 9.0 alone"),
    ],
)
def test_machete_without_splits_is_for_one_kind_of_gpu(
    pretend_cuda: Any,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    processors: int,
    shape: tuple[int, int],
    group_size: int,
    words: str | None,
) -> None:
    pretend_cuda(*capability)
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    scheme = get_scheme("w4a16", group_size)
    if words is None:
        choice = choose_linear_kernel(scheme, GPU, shape, kernels=KernelChoice.MACHETE)
        assert choice.kernel.name == "machete_whole" and choice.passed_over == ()
        return
    with pytest.raises(UserError, match=words):
        choose_linear_kernel(scheme, GPU, shape, kernels=KernelChoice.MACHETE)


def test_groups_that_vllm_cannot_multiply_go_to_others(pretend_cuda: Any) -> None:
    pretend_cuda(9, 0)
    choice = choose_linear_kernel(get_scheme("w4a16", 256), GPU, BIG)
    assert not choice.kernel.name.startswith("vllm")
    assert "vllm_marlin: supports group sizes 32, 64, 128, not 256" in choice.passed_over
    with pytest.raises(UserError, match="not 256"):
        choose_linear_kernel(get_scheme("w4a16", 256), GPU, BIG, force="vllm_machete")


@pytest.mark.parametrize(
    ("scheme", "capability", "group_size", "expected"),
    [
        ("w4a16", (9, 0), 128, "vllm_marlin_experts"),
        ("w4a16", (8, 0), 32, "vllm_marlin_experts"),
        ("w8a8", (9, 0), None, "vllm_triton_experts"),
        ("w8a8", (8, 0), None, "vllm_triton_experts"),
        ("fp8", (9, 0), None, "vllm_cutlass_experts"),
        ("fp8", (8, 9), None, "vllm_triton_experts"),
    ],
)
def test_the_choice_is_vllms(
    pretend_cuda: Any,
    scheme: str,
    capability: tuple[int, int],
    group_size: int | None,
    expected: str,
) -> None:
    pretend_cuda(*capability)
    choice = choose_experts_kernel(get_scheme(scheme, group_size or 128), GPU, QWEN3_30B)
    assert choice.kernel.name == expected


def test_what_vllm_does_otherwise_is_said(pretend_cuda: Any) -> None:
    pretend_cuda(9, 0)
    marlin, cutlass = vllm_experts.VllmMarlinExperts, vllm_experts.VllmCutlassExperts
    why_not = marlin.unavailable(get_scheme("w4a16", 32), GPU, QWEN3_30B._replace(intermediate=96))
    assert why_not in (
        "vLLM pads an intermediate size of 96 to a multiple of 64",
        "here vLLM itself runs CompressedTensorsWNA16MoEMethod",  # vLLM 0.24 does not pad
    )
    for one_group in ({"intermediate": 128}, {"hidden": 128}):
        assert "one group per row" in (
            marlin.unavailable(get_scheme("w4a16", 128), GPU, QWEN3_30B._replace(**one_group)) or ""
        )
    both = QWEN3_30B._replace(hidden=128, intermediate=128)
    assert marlin.unavailable(get_scheme("w4a16", 128), GPU, both) is None
    why_not = marlin.unavailable(get_scheme("w4a16", 32), GPU, QWEN3_30B._replace(hidden=2048 + 64))
    assert (
        why_not and why_not.startswith("here vLLM itself runs ") and "MarlinExperts" not in why_not
    )
    assert "multiples of 16" in (
        cutlass.unavailable(get_scheme("fp8"), GPU, QWEN3_30B._replace(hidden=2040)) or ""
    )
    pretend_cuda(10, 0)
    assert cutlass.unavailable(get_scheme("fp8"), GPU, QWEN3_30B)
