"""Why a kernel or an operator of vLLM's cannot serve, in words: each reason of `unavailable`, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm")

from qarl.kernels.base import ExpertsShape
from qarl.kernels.cpu import layer_ops, torch_linears
from qarl.kernels.cpu import vllm_linears as on_cpu
from qarl.kernels.cpu.vllm_experts import CpuExperts, VllmCpuBf16Experts
from qarl.kernels.cuda import layer_ops as gpu_ops
from qarl.kernels.cuda import vllm_linears as on_gpu
from qarl.kernels.cuda.vllm_experts import VllmMarlinExperts
from qarl.kernels.triton import linears as triton
from qarl.schemes import UNQUANTIZED, get_scheme
from qarl.schemes.base import BF16_BF16

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE = ExpertsShape(experts=4, top_k=2, hidden=96, intermediate=64)
MARLIN, FP8_MARLIN = "VLLM_MARLIN_INPUT_DTYPE", "VLLM_TEST_FORCE_FP8_MARLIN"
REASONS: list[tuple[Callable[[], str | None], str]] = [
    (lambda: CpuExperts.unavailable(get_scheme("w4a8"), CPU, SHAPE), "does not support w4a8"),
    (
        lambda: CpuExperts.unavailable(replace(get_scheme("w4a16"), group_size=33), CPU, SHAPE),
        "even group size",
    ),
    (lambda: VllmCpuBf16Experts.unavailable(UNQUANTIZED, GPU, SHAPE), "on cpu, not on cuda"),
    (
        lambda: VllmCpuBf16Experts.unavailable(UNQUANTIZED, CPU, SHAPE._replace(hidden=90)),
        "hidden size in multiples",
    ),
    (lambda: VllmMarlinExperts.unavailable(get_scheme("w4a16", 32), GPU, SHAPE), MARLIN),
    (lambda: on_gpu.VllmMarlinLinear.unavailable(GPU, (64, 64)), MARLIN),
    (lambda: on_gpu.VllmCutlassFP8Linear.unavailable(GPU, (64, 64)), FP8_MARLIN),
    (lambda: on_gpu._unusable.__wrapped__("no_operator"), "this vLLM build has no no_operator"),
    (
        lambda: on_cpu.cpu_ops_missing.__wrapped__("no_operator"),
        "this vLLM build has no no_operator",
    ),
    (lambda: layer_ops.attention_unavailable.__wrapped__("cuda", 64), "only on cpu"),
    (lambda: layer_ops.attention_unavailable.__wrapped__("cpu", 7), "no head size 7"),
    (on_gpu._unusable_moe.__wrapped__, "no moe_wna16_marlin_gemm, moe_sum"),
    (lambda: triton.unavailable(BF16_BF16, GPU), "no GPU in this machine"),
    (lambda: torch_linears.int8_unavailable(CPU), "no AVX512 VNNI"),
]


@pytest.mark.parametrize(("ask", "words"), REASONS, ids=[words for _, words in REASONS])
def test_the_reason_is_said(
    ask: Callable[[], str | None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARLIN, "int8")
    monkeypatch.setenv(FP8_MARLIN, "1")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert words in (ask() or "")


def test_flash_attentions_head_sizes_are_vllms() -> None:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    sizes = range(1, 300)
    theirs = [size for size in sizes if FlashAttentionBackend.supports_head_size(size)]
    assert [size for size in sizes if gpu_ops.has_head_size(size)] == theirs


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layer_ops, on_cpu, gpu_ops, on_gpu):
        monkeypatch.setattr(module, "vllm_missing", lambda: "there is no vLLM")
    attention = [
        layer_ops.attention_unavailable.__wrapped__("cpu", 64),
        gpu_ops.attention_unavailable(None),
    ]
    linears = [on_cpu.cpu_ops_missing.__wrapped__("op"), on_gpu._unusable.__wrapped__("op")]
    assert {*attention, *linears, gpu_ops.unavailable.__wrapped__()} == {"there is no vLLM"}
