"""vLLM's CUDA kernels without a GPU: which of them vLLM's own chooser gives, and what the operators are handed.

The operators are stood in for by PyTorch that reads the layouts which vLLM documents; on a GPU tests/gpu runs the real
ones. vLLM's Python around them (scale permutations, padding, the choice) is the installed one.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from qarl.errors import UserError
from qarl.kernels.activations import quantize_fp8, quantize_int8
from qarl.kernels.cuda import vllm_ops as vllm_cuda
from qarl.kernels.int4 import unpack_int4
from qarl.kernels.registry import LINEAR_KERNELS, choose_linear_kernel
from qarl.process import configure_vllm_process
from qarl.quant import get_scheme, quantize

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


@pytest.mark.parametrize(
    ("value", "forced"), [("1", True), (" True ", True), ("false", False), ("0", False), ("", False)]
)
def test_marlin_for_fp8_is_forced_as_vllm_reads_it(
    value: str, forced: bool, pretend_cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cuda(9, 0)
    monkeypatch.setenv("VLLM_TEST_FORCE_FP8_MARLIN", value)
    reason = vllm_cuda.VllmCutlassFP8Linear.unavailable("fp8", torch.device("cuda", 0), (2048, 1536))
    assert reason == ("VLLM_TEST_FORCE_FP8_MARLIN is set" if forced else None)


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


def test_vllm_comes_first_and_the_reference_last() -> None:
    for kernels in LINEAR_KERNELS.values():
        names = [kernel.name for kernel in kernels]
        ours = next((i for i, name in enumerate(names) if name.startswith("triton")), len(names))
        assert all(i < ours for i, name in enumerate(names) if name.startswith("vllm"))
        assert names[-1] == "reference"


def on_cpu() -> list[Any]:
    return [
        ("w4a16", 128, vllm_cuda.VllmMacheteLinear),
        ("w4a16", 32, vllm_cuda.VllmMarlinLinear),
        ("w4a16", 128, vllm_cuda.VllmMarlinLinear),
        ("w8a8", 128, vllm_cuda.VllmCutlassInt8Linear),
        ("fp8", 128, vllm_cuda.VllmCutlassFP8Linear),
    ]


@pytest.mark.parametrize(("scheme", "group_size", "kernel"), on_cpu())
def test_on_cpu_they_say_so(scheme: str, group_size: int, kernel: Any) -> None:
    assert kernel.unavailable(scheme, torch.device("cpu"), (256, 256)) == "runs on NVIDIA GPUs, not on cpu"


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA operators in float64, reading what they are handed as vLLM's own callers hand it."""
    ops = importlib.import_module("vllm._custom_ops")
    marlin = importlib.import_module(MARLIN)
    monkeypatch.setattr(marlin, "num_compute_units", lambda index=0: 132)

    def codes(packed: torch.Tensor) -> torch.Tensor:
        return unpack_int4(packed.t()).t().double()  # [K/8, N] -> [K, N]

    def machete_prepack_b(b_q_weight: Any, a_type: Any, b_type: Any, group_scales_type: Any) -> torch.Tensor:
        assert b_q_weight.dtype == torch.int32 and b_q_weight.stride(0) == 1, "columns must be contiguous"
        assert a_type == group_scales_type == torch.bfloat16 and (b_type.size_bits, b_type.bias) == (4, 8)
        return b_q_weight.contiguous()

    def machete_mm(a: Any, b_q: Any, b_type: Any, b_group_scales: Any, b_group_size: int) -> torch.Tensor:
        assert a.is_contiguous() and b_group_scales.is_contiguous()
        return (a.double() @ (codes(b_q) * b_group_scales.double().repeat_interleave(b_group_size, 0))).bfloat16()

    def gptq_marlin_repack(b_q_weight: Any, perm: Any, size_k: int, size_n: int, num_bits: int) -> torch.Tensor:
        assert b_q_weight.is_contiguous() and b_q_weight.shape == (size_k // 8, size_n)
        assert num_bits == 4 and perm.numel() == 0
        return b_q_weight.reshape(size_k // 16, size_n * 2)

    def marlin_gemm(a: Any, c: Any, b_q_weight: Any, b_bias: Any, b_scales: Any, *args: Any, **sizes: Any) -> Any:
        assert sizes["use_fp32_reduce"] and sizes["is_k_full"] and not sizes["use_atomic_add"]
        n, k = sizes["size_n"], sizes["size_k"]
        grouped = len(b_scales) > 1
        inverse = torch.argsort(torch.tensor(marlin.get_scale_perms()[0 if grouped else 1]))
        scales = b_scales.reshape(-1, len(inverse))[:, inverse].reshape(-1, n).double()
        y = a.double() @ (codes(b_q_weight.reshape(k // 8, n)) * scales.repeat_interleave(k // len(scales), 0))
        if b_bias is not None:
            inverse = torch.argsort(torch.tensor(marlin.get_scale_perms()[1]))
            y += b_bias.reshape(-1, len(inverse))[:, inverse].reshape(n).double()
        return y.bfloat16()

    def cutlass_scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any, bias: Any = None) -> Any:
        assert a.is_contiguous() and b.stride(0) == 1 and a.dtype == b.dtype
        y = (a.double() @ b.double()) * scale_a.double() * scale_b.double().t()
        return (y if bias is None else y + bias.double()).to(out_dtype)

    def scaled_int8_quant(input: Any, scale: Any, azp: Any, symmetric: bool) -> Any:
        assert input.is_contiguous() and scale is None and azp is None and symmetric
        return *quantize_int8(input), None

    def scaled_fp8_quant(input: Any, use_per_token_if_dynamic: bool = False) -> Any:
        assert input.is_contiguous() and use_per_token_if_dynamic
        return quantize_fp8(input)

    stand_ins = (machete_mm, gptq_marlin_repack, marlin_gemm, cutlass_scaled_mm, scaled_int8_quant, scaled_fp8_quant)
    for stand_in in stand_ins:
        monkeypatch.setattr(ops, stand_in.__name__, stand_in)
    monkeypatch.setattr(ops, "machete_prepack_B", machete_prepack_b)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("scheme", "group_size", "kernel"), on_cpu())
def test_operators_are_handed_what_they_expect(
    operators: None, scheme: str, group_size: int, kernel: Any, bias: bool
) -> None:
    """Weights with 192 rows, which Marlin pads at 256 columns and not at 128."""
    torch.manual_seed(0)
    for shape in ((192, 128), (192, 256), (256, 384)):
        tensors = quantize(torch.randn(shape).bfloat16(), get_scheme(scheme, group_size)).tensors
        prepared = kernel.prepare(tensors)
        reference = LINEAR_KERNELS[scheme][-1]
        added = torch.randn(shape[0]).bfloat16() if bias else None
        for rows in (0, 1, 7):
            x = torch.randn(2 * rows, shape[1] + 3).bfloat16()[::2, 3:]
            expected = reference.linear(x.contiguous(), reference.prepare(tensors), added)
            y = kernel.linear(x, prepared, added)
            torch.testing.assert_close(y, expected, rtol=2**-6, atol=0.1)
            assert torch.equal(kernel.dequantized_input(x), reference.dequantized_input(x))
