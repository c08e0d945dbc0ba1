"""Machete with whole sums against the locked vLLM: its schedules, and the arguments by its operators' own schemas.

A stand-in for `machete_mm` is registered for the CPU under vLLM's operator, so vLLM's wrapper and PyTorch's dispatcher
check every argument. The numbers are compared with the reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_lock import pretend, required
from torch import library

from qarl.kernels.cuda.machete import MacheteWholeLinear
from qarl.kernels.cuda.machete_schedules import SCHEDULES, plan
from qarl.kernels.int4 import unpack_int4
from qarl.kernels.reference import ReferenceW4A16Linear
from qarl.quant import get_scheme, quantize

required()

calls: list[dict[str, object]] = []


def machete_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    b_type: int,
    out_type: object,
    group_scales: torch.Tensor,
    group_zeros: object,
    group_size: int,
    channel_scales: object,
    token_scales: object,
    schedule: str,
) -> torch.Tensor:
    """The product in float64. `b` is as in the stand-in for `machete_prepack_B` below: int32 [K/8, N]."""
    calls.append({"rows": len(a), "schedule": schedule, "type": b_type, "group": group_size})
    assert out_type is group_zeros is channel_scales is token_scales is None
    assert a.is_contiguous() and group_scales.is_contiguous()
    codes = unpack_int4(b.t()).t().double()
    weight = (codes * group_scales.double().repeat_interleave(group_size, 0)).bfloat16()
    return (a.double() @ weight.double()).bfloat16()


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))


@pytest.fixture
def operators() -> Iterator[None]:
    with library._scoped_library("_C", "IMPL") as stand_ins:
        stand_ins.impl("machete_mm", machete_mm, "CPU", allow_override=True)
        stand_ins.impl(
            "machete_prepack_B", lambda b, *_: b.contiguous(), "CPU", allow_override=True
        )
        calls.clear()
        yield


def test_vllm_has_exactly_these_schedules() -> None:
    """By vLLM's function, which reads the compiled table and needs no GPU."""
    from vllm import _custom_ops as ops

    from qarl.kernels.cuda.vllm_linears import uint4b8

    compiled = ops.machete_supported_schedules(
        torch.bfloat16, uint4b8(), group_scales_type=torch.bfloat16
    )
    assert sorted(compiled) == sorted(schedule.name for schedule in SCHEDULES)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("shape", [(256, 640), (192, 1024)], ids=str)
def test_the_call_is_one_that_vllms_operator_takes(
    operators: None, shape: tuple[int, int], group_size: int, bias: bool
) -> None:
    from qarl.kernels.cuda.vllm_linears import uint4b8

    torch.manual_seed(0)
    tensors = quantize(torch.randn(shape).bfloat16(), get_scheme("w4a16", group_size)).tensors
    prepared = MacheteWholeLinear.prepare(tensors)
    added = torch.randn(shape[0]).bfloat16() if bias else None
    for rows in (1, 7, 600):
        x = torch.randn(2 * rows, shape[1]).bfloat16()[::2]
        y = MacheteWholeLinear.linear(x, prepared, added)
        weight = ReferenceW4A16Linear.prepare(tensors)
        product = ReferenceW4A16Linear.linear(x, weight, None)
        expected = product if added is None else product + added  # as vLLM adds it
        # Two sums in FP32 may have other orders, and each result is rounded to BF16.
        of_sums = 2 * shape[1] * 2**-24 * (x.float().abs() @ weight.float().abs().t())
        assert ((y - expected).abs() <= (product.abs() + expected.abs()) * 2**-7 + of_sums).all()
        call = plan(256, shape[1], rows)
        assert calls.pop() == {
            "rows": call.rows,
            "schedule": call.schedule,
            "type": uint4b8().id,
            "group": group_size,
        }
