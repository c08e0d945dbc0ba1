"""The product of a router, for trainer and engine: logits [T, E] = x W^T in BF16, with FP32 sums in the order of K.

A router has few outputs (128 in Qwen3-30B-A3B), so cuBLAS is likely to split its sums over K, in a way that depends on
the number of tokens, in FP32 as in BF16. Here one program computes a whole sum, with one tile for any number of tokens.
So the logits of a token have the same bits whatever tokens are beside it. They are rounded to BF16 once, at the end,
like those of vLLM's own router.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qarl.kernels.base import launch
from qarl.kernels.triton.numbers import LAUNCH, dot
from qarl.kernels.triton.quantize import adjacent
from qarl.kernels.triton.w4a16 import store_forward

_BM, _BN, _BK = 64, 64, 128  # tokens, experts, and inputs a step


@triton.jit
def router_kernel(
    x_ptr, weight_ptr, logits_ptr, M, E, K, stride_xm,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """A program computes one tile. Programs that share tokens are neighbours, so that x is read from memory once."""
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(E, BN)
    row = (tile // tiles_n) * BM
    column = (tile % tiles_n) * BN
    rows = tl.minimum(tl.arange(0, BM), M - 1 - row) * stride_xm
    channels = tl.minimum(column + tl.arange(0, BN), E - 1) * K
    inputs = tl.arange(0, BK)
    x_ptr += row.to(tl.int64) * stride_xm
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(0, K, BK):
        weights = weight_ptr + channels[:, None] + (start + inputs)[None, :]
        tokens = x_ptr + rows[:, None] + (start + inputs)[None, :]
        if EVEN_K:
            w = tl.load(weights)
            x = tl.load(tokens)
        else:
            inside = (start + inputs < K)[None, :]
            w = tl.load(weights, mask=inside, other=0.0)
            x = tl.load(tokens, mask=inside, other=0.0)
        acc = dot(w, tl.trans(x), acc)
    store_forward(acc, None, logits_ptr, row, column, M, E, BM, BN)


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T, BF16 [T, E], from x BF16 [T, H], whose rows may be strided, and weight BF16 [E, H]."""
    (tokens, columns), experts = x.shape, weight.shape[0]
    logits = x.new_empty(tokens, experts)
    x = adjacent(x)
    tiles = triton.cdiv(tokens, _BM) * triton.cdiv(experts, _BN)
    launch(
        router_kernel, (tiles,), x, weight.contiguous(), logits, tokens, experts, columns, x.stride(0),
        _BM, _BN, _BK, columns % _BK == 0, num_warps=4, num_stages=3, **LAUNCH,
    )  # fmt: skip
    return logits
