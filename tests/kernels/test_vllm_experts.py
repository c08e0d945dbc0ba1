"""vLLM's fused experts without a GPU: what its own chooser answers. On a GPU tests/gpu runs its kernels."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")


from qarl.kernels.cuda import vllm_ops as vllm_cuda
from qarl.kernels.experts import cuda as vllm_experts
from qarl.kernels.experts.autograd import choose_experts_kernel
from qarl.kernels.experts.grouped import ExpertsShape
from qarl.process import configure_vllm_process

configure_vllm_process()
MOE = "vllm.model_executor.layers.fused_moe"
UTILS = "vllm.model_executor.layers.quantization.utils"
QWEN3_30B = ExpertsShape(experts=128, top_k=8, hidden=2048, intermediate=768)


@pytest.fixture
def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's platform as on a GPU of a given capability. Its modules are imported before, as a CPU build must."""

    def pretend(major: int, minor: int) -> None:
        for name in ("config", "experts.cutlass_moe", "experts.triton_moe", "experts.marlin_moe", "oracle.fp8"):
            importlib.import_module(f"{MOE}.{name}")
        importlib.import_module(f"{vllm_experts._COMPRESSED_TENSORS}.compressed_tensors")
        from vllm.platforms import PlatformEnum, current_platform
        from vllm.platforms.interface import DeviceCapability

        capability = DeviceCapability(major, minor)
        platform = type(current_platform)
        monkeypatch.setattr(platform, "_enum", PlatformEnum.CUDA)
        monkeypatch.setattr(platform, "get_device_capability", classmethod(lambda cls, device_id=0: capability))
        monkeypatch.setattr(platform, "supports_fp8", classmethod(lambda cls: (major, minor) >= (8, 9)))
        cutlass = importlib.import_module(f"{MOE}.experts.cutlass_moe")
        monkeypatch.setattr(cutlass, "cutlass_group_gemm_supported", lambda: major in (9, 10))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(vllm_cuda, "_unusable", lambda operator: None)
        monkeypatch.setattr(vllm_experts, "_unusable", lambda: None)
        vllm_experts.engines_choice.cache_clear()

    yield pretend
    vllm_experts.engines_choice.cache_clear()


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
    pretend_cuda: Any, scheme: str, capability: tuple[int, int], group_size: int | None, expected: str
) -> None:
    pretend_cuda(*capability)
    choice = choose_experts_kernel(scheme, torch.device("cuda", 0), QWEN3_30B, group_size=group_size)
    assert choice.kernel.name == expected


def test_what_vllm_does_otherwise_is_said(pretend_cuda: Any) -> None:
    pretend_cuda(9, 0)
    device = torch.device("cuda", 0)
    marlin, cutlass = vllm_experts.VllmMarlinExperts, vllm_experts.VllmCutlassExperts
    why_not = marlin.unavailable("w4a16", device, QWEN3_30B._replace(intermediate=96), 32)
    assert why_not in (
        "vLLM pads an intermediate size of 96 to a multiple of 64",
        "here vLLM itself runs CompressedTensorsWNA16MoEMethod",  # vLLM 0.24 does not pad
    )
    for one_group in ({"intermediate": 128}, {"hidden": 128}):
        assert "one group per row" in (marlin.unavailable("w4a16", device, QWEN3_30B._replace(**one_group), 128) or "")
    both = QWEN3_30B._replace(hidden=128, intermediate=128)
    assert marlin.unavailable("w4a16", device, both, 128) is None
    why_not = marlin.unavailable("w4a16", device, QWEN3_30B._replace(hidden=2048 + 64), 32)
    assert why_not and why_not.startswith("here vLLM itself runs ") and "MarlinExperts" not in why_not
    assert "multiples of 16" in (cutlass.unavailable("fp8", device, QWEN3_30B._replace(hidden=2040), None) or "")
    pretend_cuda(10, 0)
    assert cutlass.unavailable("fp8", device, QWEN3_30B, None)
