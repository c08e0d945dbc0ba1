"""Mixture-of-experts kernels: routing, the forward against float64, and the straight-through backward against autograd
through float64 products of what the forward multiplied by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_cases import SHAPE, make, stacked
from kernels_by_scheme import experts_kernels

from qarl.errors import UserError
from qarl.kernels import grouped
from qarl.kernels.base import with_least_pairs
from qarl.kernels.cpu.vllm_experts import CpuExperts
from qarl.kernels.cuda import vllm_experts as cuda
from qarl.kernels.cuda.vllm_experts import VllmCutlassExperts
from qarl.kernels.experts import (
    LowBitExperts,
    ReferenceExperts,
    TritonInvariantExperts,
    fused_experts,
)
from qarl.kernels.reference import quantize_fp8
from qarl.kernels.registry import (
    choose_experts_kernel,
    presumed_experts_kernel,
)
from qarl.schemes import get_scheme
from qarl.schemes.base import FP8_FP8, INT4_BF16
from qarl.schemes.kernel_choice import KernelChoice

SCHEMES = ("w4a16", "w8a8", "fp8")
CPU = torch.device("cpu")


def test_routing_sorts_rows_and_restores_them() -> None:
    ids = torch.tensor([[4, 0], [0, 2], [4, 2]], dtype=torch.int32)
    routing = grouped.route(ids, 6)
    assert routing.ends.tolist() == [2, 2, 4, 4, 6, 6] and routing.ends.dtype == torch.int32
    assert routing.token.tolist() == [0, 1, 1, 2, 0, 2]
    rows = (routing.order[:, None] * torch.ones(1, 3)).bfloat16()
    assert grouped.combine(rows, routing, 2).tolist() == [[1.0] * 3, [5.0] * 3, [9.0] * 3]


def test_what_needs_no_gradient_gets_none() -> None:
    x, weights, ids, gate_up, down = make()
    stacks = stacked(gate_up, "w4a16"), stacked(down, "w4a16")
    experts = LowBitExperts.of(ReferenceExperts, *stacks, INT4_BF16)
    router = weights.clone().requires_grad_()
    fused_experts(x, router, ids, None, None, experts).sum().backward()
    assert router.grad is not None and x.grad is None
    frozen = fused_experts(x, weights, ids, gate_up, down, experts)
    assert not frozen.requires_grad


def test_a_call_gets_the_least_pairs_of_its_kernel() -> None:
    """7 tokens of 2 experts have 14 pairs. 65 pairs need 33 tokens, so 26 copies of the last token are added."""
    x, weights, ids, _, _ = make(tokens=7)
    padded = with_least_pairs(VllmCutlassExperts, x, weights, ids)
    for tensor, before in zip(padded, (x, weights, ids), strict=True):
        assert len(tensor) == 33 and torch.equal(tensor[:7], before)
        assert torch.equal(tensor[7:], before[-1:].expand(26, -1))
    enough = make(tokens=33)[:3]
    assert all(
        a is b for a, b in zip(with_least_pairs(VllmCutlassExperts, *enough), enough, strict=True)
    )
    assert with_least_pairs(ReferenceExperts, x, weights, ids)[0] is x


def test_padding_drops_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator of CUTLASS's kernel sees enough pairs, and its caller only the outputs of the tokens."""
    seen: dict[str, Any] = {}

    def operator(**words: Any) -> None:
        seen.update(words)
        words["output"].copy_(
            torch.arange(len(words["output"]))[:, None].expand_as(words["output"])
        )

    module = SimpleNamespace(run_cutlass_moe_fp8=operator)
    monkeypatch.setattr(cuda.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(cuda, "silu", lambda: "silu")
    monkeypatch.setattr(VllmCutlassExperts, "quantize", lambda operands, x: quantize_fp8(x))
    x, weights, ids, gate_up, down = make(tokens=7)
    prepared = VllmCutlassExperts.prepare(stacked(gate_up, "fp8"), stacked(down, "fp8"), FP8_FP8)
    y = VllmCutlassExperts.forward(x, weights, ids, prepared)
    assert seen["topk_ids"].numel() == 66 and seen["workspace13"].shape[0] == 66
    assert y[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_the_choice_by_quant_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only QaRL's own kernel is for both sides. On a machine that is not here it is presumed, or else vLLM's."""
    qarl, engine = KernelChoice.QARL, KernelChoice.ENGINE
    presumed = {
        scheme: [
            getattr(
                presumed_experts_kernel(get_scheme(scheme).operands, kernels, "cuda"), "name", None
            )
            for kernels in (engine, qarl)
        ]
        for scheme in (*SCHEMES, "bf16")
    }
    own = "triton_batch_invariant"
    assert presumed == {
        "w4a16": ["vllm_marlin_experts", own],
        "w8a8": ["vllm_triton_experts", own],
        "fp8": ["vllm_cutlass_experts", own],
        "bf16": [None, None],
    }
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    choice = choose_experts_kernel(get_scheme("w4a16", 32), CPU, SHAPE, kernels=qarl)
    assert choice.kernel is TritonInvariantExperts and choice.kernel.row_invariant
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UserError, match=r"of quant\.kernels=qarl serves w4a16 experts on cpu"):
        choose_experts_kernel(get_scheme("w4a16", 32), CPU, SHAPE, kernels=qarl)
    refusal = r"(?s)quant\.kernels=dequantized multiplies int4.*set quant\.kernels=engine or qarl"
    with pytest.raises(UserError, match=refusal):
        choose_experts_kernel(get_scheme("w4a16", 32), CPU, SHAPE, kernels=KernelChoice.DEQUANTIZED)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_choice_on_cpu(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(CpuExperts, "unavailable", lambda *arguments: "vllm is not installed")
    choice = choose_experts_kernel(get_scheme(scheme, 32), CPU, SHAPE)
    assert (
        choice.kernel is ReferenceExperts
        and len(choice.passed_over) == len(experts_kernels(scheme)) - 1
    )
    with pytest.raises(UserError, match="runs on GPUs"):
        choose_experts_kernel(get_scheme(scheme, 32), CPU, SHAPE, force="triton")
    with pytest.raises(UserError, match="no kernel of experts multiplies int4"):
        choose_experts_kernel(get_scheme("w4a8"), CPU, SHAPE)
