"""Experts on a CPU: against float64, bit for bit independent of the other tokens, and vLLM's own choice for BF16."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from cpu_features import needs_vllm_cpu, needs_w4a16_cpu
from expert_cases import make, stacked

from qarl.kernels.base import ExpertsShape
from qarl.kernels.cpu import vllm_experts
from qarl.kernels.cpu.vllm_experts import CpuExperts, VllmCpuBf16Experts
from qarl.kernels.cpu.vllm_linears import cpu_ops_missing
from qarl.process import allow_matrix_tiles
from qarl.schemes import get_scheme
from qarl.schemes.base import BF16_BF16

pytestmark = [needs_w4a16_cpu, needs_vllm_cpu]
CPU = torch.device("cpu")
SCHEMES = ("w4a16", "w8a8", "fp8")
SHAPE = ExpertsShape(experts=6, top_k=3, hidden=128, intermediate=64)
WIDE = ExpertsShape(experts=3, top_k=2, hidden=1024, intermediate=736)
"""More columns than FP8's product takes in one go on some libraries."""


@pytest.fixture(scope="module", autouse=True)
def tiles() -> None:
    """Choosing a kernel asks for AMX. Some tests here take a kernel without choosing it."""
    allow_matrix_tiles()


def kernel_of(scheme: str) -> Any:
    return VllmCpuBf16Experts if scheme == "bf16" else CpuExperts


def wire(scheme: str, *stacks: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"weight": stack} if scheme == "bf16" else stacked(stack, scheme) for stack in stacks]


@pytest.mark.parametrize("scheme", ["bf16", *SCHEMES])
@pytest.mark.parametrize("shape", [SHAPE, WIDE])
def test_a_token_does_not_depend_on_the_others(scheme: str, shape: ExpertsShape) -> None:
    x, weights, ids, gate_up, down = make(shape, 150)
    kernel = kernel_of(scheme)
    made = kernel.prepare(*wire(scheme, gate_up, down), get_scheme(scheme).operands)
    whole = kernel.forward(x, weights, ids, made)
    for size in (1, 2, 7, 64):
        for start in range(0, 150 if size > 1 else 30, size):
            rows = slice(start, start + size)
            part = kernel.forward(
                x[rows].contiguous(), weights[rows].contiguous(), ids[rows].contiguous(), made
            )
            assert torch.equal(part, whole[rows]), (size, start)
    order = torch.randperm(150)
    assert torch.equal(kernel.forward(x[order], weights[order], ids[order], made), whole[order])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_expert_is_the_dense_kernel_of_its_scheme(scheme: str) -> None:
    """One token, one expert, weight 1: the same bits as three dense layers."""
    from qarl.kernels.reference import silu_mul
    from qarl.kernels.registry import choose_linear_kernel

    x, _, ids, gate_up, down = make(SHAPE._replace(top_k=1), 40)
    stacks = wire(scheme, gate_up, down)
    prepared = CpuExperts.prepare(*stacks, get_scheme(scheme).operands)
    y = CpuExperts.forward(x, torch.ones(40, 1), torch.full_like(ids, 3), prepared)

    def dense(rows: torch.Tensor, part: dict[str, torch.Tensor]) -> torch.Tensor:
        tensors = {name: tensor[3] for name, tensor in part.items()}
        kernel = choose_linear_kernel(
            get_scheme(scheme), CPU, (tensors["weight_scale"].shape[0], rows.shape[1])
        ).kernel
        return kernel.linear(rows, kernel.prepare(tensors), None)

    assert torch.equal(y, dense(silu_mul(*dense(x, stacks[0]).chunk(2, 1)), stacks[1]))


def test_the_sum_follows_the_routers_order() -> None:
    rows = torch.tensor([[[2.0**12], [1.0], [-(2.0**12)]]]).bfloat16()
    weights = torch.tensor([[1.0, 2.0**-12, 1.0]])
    assert vllm_experts._weighted_sum(rows, weights).item() == 0.0
    swapped = vllm_experts._weighted_sum(rows[:, [0, 2, 1]], weights[:, [0, 2, 1]])
    assert swapped.item() == 2.0**-12
    terms = torch.tensor([[[1.0], [-1.0]]]).bfloat16()
    assert (
        vllm_experts._weighted_sum(terms, torch.tensor([[1 + 2.0**-20, 1.0]])).item() == 2.0**-20
    ), "terms are FP32"


@pytest.mark.parametrize("scheme", ["bf16", *SCHEMES])
def test_preparing_under_vllms_default_dtype_changes_nothing(scheme: str) -> None:
    x, weights, ids, *stacks = make(SHAPE, 23)
    kernel, tensors = kernel_of(scheme), wire(scheme, *stacks)
    operands = get_scheme(scheme).operands
    expected = kernel.forward(x, weights, ids, kernel.prepare(*tensors, operands))
    torch.set_default_dtype(torch.bfloat16)
    try:
        y = kernel.forward(x, weights, ids, kernel.prepare(*tensors, operands))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("intermediate", [64, 56])
def test_bf16_is_what_vllm_chooses(intermediate: int) -> None:
    """Its class, its instruction set, its padding and its packing."""
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
        select_unquantized_moe_backend,
    )

    *_, gate_up, down = make(SHAPE._replace(intermediate=intermediate))
    moe_config = config.FusedMoEConfig(
        num_experts=6, num_local_experts=6, num_logical_experts=6, experts_per_token=3, hidden_dim=128,
        intermediate_size=intermediate, activation=MoEActivation.SILU, device="cpu", in_dtype=torch.bfloat16,
        routing_method=config.RoutingMethodType.Renormalize,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
    )  # fmt: skip
    _, chosen = select_unquantized_moe_backend(moe_config=moe_config)
    experts: Any = chosen(moe_config, config.FUSED_MOE_UNQUANTIZED_CONFIG)
    layer: Any = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(gate_up.clone(), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(down.clone(), requires_grad=False)
    layer.use_grouped_topk, layer.renormalize, layer.scoring_func = False, True, "softmax"
    layer.custom_routing_function, layer.moe_config = None, moe_config
    experts.process_weights_after_loading(layer)
    made = VllmCpuBf16Experts.prepare({"weight": gate_up}, {"weight": down}, BF16_BF16)
    assert experts.isa == made.isa and not experts._use_zentorch
    assert torch.equal(layer.w13_weight, made.gate_up) and torch.equal(layer.w2_weight, made.down)


def test_asking_for_operators_leaves_the_environment_of_a_running_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """QaRL's plugin asks in vLLM's workers, whose dense layers the user may have set up otherwise."""
    monkeypatch.delenv("VLLM_CPU_INT4_W4A8", raising=False)
    assert cpu_ops_missing.__wrapped__("cpu_gemm_wna16") is None
    assert "VLLM_CPU_INT4_W4A8" not in os.environ
    monkeypatch.delitem(sys.modules, "vllm")
    cpu_ops_missing.__wrapped__("cpu_gemm_wna16")
    assert os.environ.pop("VLLM_CPU_INT4_W4A8") == "0"
