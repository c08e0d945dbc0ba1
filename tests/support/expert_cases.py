"""A mixture-of-experts layer with random weights, and what it computes in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from qarl.kernels import grouped
from qarl.kernels.base import ExpertsShape
from qarl.kernels.reference import quantize_fp8, quantize_int8
from qarl.quant import get_scheme, quantize

SHAPE = ExpertsShape(experts=5, top_k=2, hidden=96, intermediate=64)


def stacked(weights: torch.Tensor, scheme: str, group_size: int = 32) -> dict[str, torch.Tensor]:
    """The wire tensors of [E, N, K]."""
    each = [quantize(weight, get_scheme(scheme, group_size)).tensors for weight in weights]
    return {
        name: torch.stack([tensors[name] for tensors in each])
        for name in each[0]
        if name != "weight_shape"
    }


def make(shape: ExpertsShape = SHAPE, tokens: int = 23) -> tuple[torch.Tensor, ...]:
    """x, topk_weights, topk_ids, gate_up, down; expert 1 gets no token."""
    torch.manual_seed(0)
    experts, top_k, hidden, intermediate = shape
    x = torch.randn(tokens, hidden).bfloat16()
    scores = torch.rand(tokens, experts)
    scores[:, 1] = -1
    weights, ids = scores.topk(top_k)
    gate_up = (torch.randn(experts, 2 * intermediate, hidden) / hidden**0.5).bfloat16()
    down = (torch.randn(experts, hidden, intermediate) / intermediate**0.5).bfloat16()
    return x, (weights / weights.sum(1, keepdim=True)).float(), ids.to(torch.int32), gate_up, down


def exact(
    scheme: str,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    w1: Any,
    w2: Any,
    int8: Any = quantize_int8,
) -> torch.Tensor:
    """float64, with the forward's roundings to BF16 and to 8 bits, which gradients pass straight through.

    `int8`: how the kernel quantizes activations in W8A8."""
    quantizer = int8 if scheme == "w8a8" else quantize_fp8

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return t + (t.detach().bfloat16().double() - t).detach()

    def seen(t: torch.Tensor) -> torch.Tensor:
        if scheme in ("w4a16", "bf16"):
            return t
        values, scale = quantizer(t.detach().bfloat16())
        return t + (values.double() * scale.double() - t).detach()

    out = torch.zeros_like(x)
    for place in range(ids.shape[1]):
        for expert in range(len(w1)):
            rows = (ids[:, place] == expert).nonzero()[:, 0]
            gate, up = rounded(seen(x[rows]) @ w1[expert].t()).chunk(2, 1)
            y = seen(rounded(rounded(F.silu(gate)) * up)) @ w2[expert].t()
            out = out.index_add(0, rows, y * weights[rows, place, None])
    return out


def exact_bf16(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w1: Any, w2: Any
) -> torch.Tensor:
    """float64, rounded to BF16 after silu(gate) * up alone."""
    out = torch.zeros_like(x)
    for place in range(ids.shape[1]):
        for token, expert in enumerate(ids[:, place].tolist()):
            gate, up = (w1[expert] @ x[token]).chunk(2)
            out[token] += (
                w2[expert] @ (F.silu(gate) * up).bfloat16().double() * weights[token, place]
            )
    return out


def exact_weight(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """float64 [E, N, K]; W4A16 multiplies by the BF16 rounding of code times scale, the others scale the sum."""
    if "weight_packed" in tensors:
        return grouped.dequantized(tensors).double()
    return tensors["weight"].double() * tensors["weight_scale"].double()


def off(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    return float(
        (tensor.detach().double() - expected.detach()).norm() / expected.detach().double().norm()
    )
