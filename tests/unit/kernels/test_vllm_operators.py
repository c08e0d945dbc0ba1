"""What vLLM's operators for GPUs are handed, without a GPU: tests/gpu runs the real ones.

Those of linears have stand-ins in float64 that read the layouts which vLLM documents. vLLM's Python around them, which
pads and permutes, is the installed one. Of the functions for experts only the arguments are checked.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from expert_cases import make, stacked
from kernels_by_scheme import linear_kernels

from qarl.kernels.base import ExpertsShape, with_least_pairs
from qarl.kernels.cuda import machete, vllm_experts, vllm_linears
from qarl.kernels.cuda.machete_schedules import plan
from qarl.kernels.int4 import unpack_int4
from qarl.kernels.reference import quantize_fp8, quantize_int8
from qarl.process import configure_vllm_process
from qarl.quant import get_scheme, quantize

configure_vllm_process()
ops = importlib.import_module("vllm._custom_ops")
marlin = importlib.import_module(vllm_linears._MARLIN)


def codes(packed: torch.Tensor) -> torch.Tensor:
    """int32 [K/8, N] -> float64 [K, N]."""
    return unpack_int4(packed.t()).t().double()


def unpermuted(row: torch.Tensor, one_group: bool) -> torch.Tensor:
    inverse = torch.argsort(torch.tensor(marlin.get_scale_perms()[int(one_group)]))
    return row.reshape(-1, len(inverse))[:, inverse].reshape(row.shape).double()


machete_calls: list[tuple[str | None, int]] = []
"""Schedule and rows of each call of Machete in a test."""


def machete_mm(
    a: Any,
    b_q: Any,
    b_type: Any,
    b_group_scales: Any,
    b_group_size: int,
    schedule: str | None = None,
) -> torch.Tensor:
    assert (
        a.is_contiguous()
        and b_group_scales.is_contiguous()
        and (b_type.size_bits, b_type.bias) == (4, 8)
    )
    machete_calls.append((schedule, len(a)))
    return (
        a.double() @ (codes(b_q) * b_group_scales.double().repeat_interleave(b_group_size, 0))
    ).bfloat16()


def gptq_marlin_repack(
    weight: Any, perm: Any, size_k: int, size_n: int, num_bits: int
) -> torch.Tensor:
    assert (
        weight.is_contiguous()
        and weight.shape == (size_k // 8, size_n)
        and num_bits == 4
        and perm.numel() == 0
    )
    return weight.reshape(size_k // 16, size_n * 2)


def marlin_gemm(
    a: Any, c: Any, weight: Any, bias: Any, scales: Any, *_: Any, **sizes: Any
) -> torch.Tensor:
    n, k = sizes["size_n"], sizes["size_k"]
    factors = unpermuted(scales, len(scales) == 1).repeat_interleave(k // len(scales), 0)
    y = a.double() @ (codes(weight.reshape(k // 8, n)) * factors)
    return (y if bias is None else y + unpermuted(bias.reshape(1, n), True)).bfloat16()


def cutlass_scaled_mm(
    a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any, bias: Any
) -> torch.Tensor:
    assert a.is_contiguous() and b.stride(0) == 1 and a.dtype == b.dtype
    # Below 65 rows the operator multiplies e4m3 sums by the scales in another order.
    assert a.dtype == torch.int8 or len(a) >= 65
    y = (a.double() @ b.double()) * scale_a.double() * scale_b.double().t()
    return (y if bias is None else y + bias.double()).to(out_dtype)


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    for stand_in in (machete_mm, gptq_marlin_repack, marlin_gemm, cutlass_scaled_mm):
        monkeypatch.setattr(ops, stand_in.__name__, stand_in)
    monkeypatch.setattr(ops, "machete_prepack_B", lambda weight, **_: weight.contiguous())
    monkeypatch.setattr(
        ops, "scaled_int8_quant", lambda x, scale, azp, symmetric: (*quantize_int8(x), None)
    )
    monkeypatch.setattr(
        ops, "scaled_fp8_quant", lambda x, use_per_token_if_dynamic: quantize_fp8(x)
    )
    monkeypatch.setattr(marlin, "num_compute_units", lambda index=0: 132)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("kernel", "scheme", "group_size"),
    [
        (vllm_linears.VllmMacheteLinear, "w4a16", 64),
        (machete.MacheteWholeLinear, "w4a16", 64),
        (machete.MacheteWholeLinear, "w4a16", 128),
        (vllm_linears.VllmMarlinLinear, "w4a16", 32),
        (vllm_linears.VllmMarlinLinear, "w4a16", 128),
        (vllm_linears.VllmCutlassInt8Linear, "w8a8", None),
        (vllm_linears.VllmCutlassFP8Linear, "fp8", None),
    ],
)
def test_linears(kernel: Any, scheme: str, group_size: int, bias: bool) -> None:
    """Weights with 192 rows, which Marlin pads at 256 columns and not at 128; inputs whose rows are strided."""
    torch.manual_seed(0)
    for shape in ((192, 128), (192, 256), (256, 384)):
        tensors = quantize(torch.randn(shape).bfloat16(), get_scheme(scheme, group_size)).tensors
        reference = linear_kernels(scheme)[-1]
        added = torch.randn(shape[0]).bfloat16() if bias else None
        for rows in (0, 1, 7):
            x = torch.randn(2 * rows, shape[1] + 3).bfloat16()[::2, 3:]
            y = kernel.linear(x, kernel.prepare(tensors), added)
            expected = reference.linear(x.contiguous(), reference.prepare(tensors), added)
            torch.testing.assert_close(y, expected, rtol=2**-6, atol=0.1)


def test_machete_is_called_with_the_rows_and_the_schedule_of_the_plan() -> None:
    """Weights with 192 rows are padded to 256, and 3 rows of activations to those that keep sums of K = 640 whole."""
    torch.manual_seed(0)
    tensors = quantize(torch.randn(192, 640).bfloat16(), get_scheme("w4a16", 128)).tensors
    prepared = machete.MacheteWholeLinear.prepare(tensors)
    assert prepared.weight.shape == (640 // 8, 256) and prepared.scale.shape == (5, 192)
    reference = linear_kernels("w4a16")[-1]
    x = torch.randn(3, 640).bfloat16()
    machete_calls.clear()
    y = machete.MacheteWholeLinear.linear(x, prepared, None)
    assert machete_calls == [plan(256, 640, 3)] and machete_calls[0][1] >= 528
    assert y.shape == (3, 192) and y.is_contiguous()
    torch.testing.assert_close(
        y, reference.linear(x, reference.prepare(tensors), None), rtol=2**-6, atol=0.1
    )
    bias = torch.randn(192).bfloat16()
    biased = machete.MacheteWholeLinear.linear(x, prepared, bias)
    assert torch.equal(biased, y + bias), "vLLM adds the bias to the rounded product"


@pytest.mark.parametrize(
    ("kernel", "scheme", "function"),
    [
        (vllm_experts.VllmMarlinExperts, "w4a16", "experts.marlin_moe.fused_marlin_moe"),
        (vllm_experts.VllmTritonExperts, "w8a8", "fused_moe.fused_experts"),
        (vllm_experts.VllmTritonExperts, "fp8", "fused_moe.fused_experts"),
        (vllm_experts.VllmCutlassExperts, "fp8", "experts.cutlass_moe.run_cutlass_moe_fp8"),
    ],
)
def test_experts(monkeypatch: pytest.MonkeyPatch, kernel: Any, scheme: str, function: str) -> None:
    module, _, name = f"{vllm_linears.MOE}.{function}".rpartition(".")
    theirs, passed = importlib.import_module(module), dict[str, Any]()
    signature = inspect.signature(getattr(theirs, name))
    monkeypatch.setattr(
        theirs,
        name,
        lambda **words: passed.update(signature.bind(**words).arguments) or words["w1"],
    )
    x, weights, ids, gate_up, down = make(
        ExpertsShape(experts=5, top_k=2, hidden=256, intermediate=64)
    )
    stacks = [stacked(weight, scheme) for weight in (gate_up, down)]
    kernel.forward(x, weights, ids, kernel.prepare(*stacks, get_scheme(scheme).operands))
    x, weights, ids = with_least_pairs(kernel, x, weights, ids)
    assert torch.equal(passed["topk_weights"], weights) and torch.equal(passed["topk_ids"], ids)
    assert (
        len(passed["w1"]) == 5
        and passed.get("global_num_experts", 5) == 5
        and passed.get("out_dtype", x.dtype) == x.dtype
    )
    if name == "run_cutlass_moe_fp8":
        assert torch.equal(passed["hidden_states"], quantize_fp8(x)[0])
        assert ids.numel() == 66 and len(passed["output"]) == 33
        strides = [passed[f"{which}_strides{number}"] for which in ("ab", "c") for number in (1, 2)]
        assert [stride.tolist() for stride in strides] == [
            [size] * 5 for size in (256, 64, 128, 256)
        ]
