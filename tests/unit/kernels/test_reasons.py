"""Why a kernel or an operator of vLLM's cannot serve, in words: each reason of `unavailable`, without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("vllm")

from qarl.kernels.base import ExpertsShape
from qarl.kernels.cpu import layer_ops
from qarl.kernels.cpu import vllm_linears as on_cpu
from qarl.kernels.cuda import vllm_linears as on_gpu
from qarl.kernels.vllm_experts import CpuExperts, VllmCpuBf16Experts, VllmMarlinExperts

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE = ExpertsShape(experts=4, top_k=2, hidden=96, intermediate=64)
MARLIN, FP8_MARLIN = "VLLM_MARLIN_INPUT_DTYPE", "VLLM_TEST_FORCE_FP8_MARLIN"
REASONS: list[tuple[Callable[[], str | None], str]] = [
    (lambda: CpuExperts.unavailable("w4a8", CPU, SHAPE, 32), "does not support w4a8"),
    (lambda: CpuExperts.unavailable("w4a16", CPU, SHAPE, 33), "even group size"),
    (lambda: VllmCpuBf16Experts.unavailable("bf16", GPU, SHAPE, None), "on cpu, not on cuda"),
    (lambda: VllmCpuBf16Experts.unavailable("w4a16", CPU, SHAPE, 32), "only BF16 weights"),
    (lambda: VllmCpuBf16Experts.unavailable("bf16", CPU, SHAPE._replace(hidden=90), None), "hidden size in multiples"),
    (lambda: VllmMarlinExperts.unavailable("w4a16", GPU, SHAPE, 32), MARLIN),
    (lambda: on_gpu.VllmMarlinLinear.unavailable("w4a16", GPU, (64, 64)), MARLIN),
    (lambda: on_gpu.VllmCutlassFP8Linear.unavailable("fp8", GPU, (64, 64)), FP8_MARLIN),
    (lambda: on_gpu._unusable.__wrapped__("no_operator"), "this vLLM build has no no_operator"),
    (lambda: on_cpu.cpu_ops_missing.__wrapped__("no_operator"), "this vLLM build has no no_operator"),
    (lambda: layer_ops.attention_unavailable.__wrapped__("cuda", 64), "only on cpu"),
    (lambda: layer_ops.attention_unavailable.__wrapped__("cpu", 7), "no head size 7"),
]


@pytest.mark.parametrize(("ask", "words"), REASONS, ids=[words for _, words in REASONS])
def test_the_reason_is_said(ask: Callable[[], str | None], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARLIN, "int8")
    monkeypatch.setenv(FP8_MARLIN, "1")
    assert words in (ask() or "")
