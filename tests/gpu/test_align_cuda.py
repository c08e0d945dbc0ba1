"""Operator by operator: PyTorch against vLLM's CUDA operators, as docs/alignment_cuda.md lists them.

Each test names the formulas that vLLM's operator may follow (they changed between releases), prints for each how many
outputs differ and by how much, and asks that the nearest be within one BF16 step almost everywhere. `pytest -rP` shows
what is printed. Level `model` on CUDA follows from these figures.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F

from qarl.align.attention import fp32_attention
from qarl.process import configure_vllm_process

pytestmark = pytest.mark.gpu

TOKENS = (1, 7, 333, 2048)
HIDDEN = 4096
EPSILON = 1e-6


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def compare(what: str, theirs: torch.Tensor, candidates: Mapping[str, torch.Tensor]) -> str:
    """Prints the difference of every candidate; the name of the nearest, which is within a BF16 step, else fails."""
    shares = {}
    for name, ours in candidates.items():
        difference = (ours.float() - theirs.float()).abs()
        shares[name] = float((difference > 0).float().mean())
        off = f"mean {difference.mean():.2e}  max {difference.max():.2e}"
        print(f"{what:28} {name:34} differ {shares[name]:9.2e}  {off}")
    nearest = min(shares, key=lambda name: shares[name])
    step = 2**-7 * theirs.float().abs() + 1e-3
    beyond = ((candidates[nearest].float() - theirs.float()).abs() > step).float().mean()
    assert float(beyond) <= 1e-5, f"{what}: {float(beyond):.1e} of the outputs are more than a BF16 step off"
    return nearest


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("vllm")
    configure_vllm_process()
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C

    if not hasattr(torch.ops._C, "fused_add_rms_norm"):
        pytest.skip("this vLLM build has no CUDA operators")


@pytest.mark.parametrize("tokens", TOKENS)
def test_fused_add_rms_norm(tokens: int) -> None:
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    x, residual, weight = random(tokens, HIDDEN), random(tokens, HIDDEN), random(HIDDEN)
    exact_sum = x.float() + residual.float()

    def normalised(total: torch.Tensor) -> torch.Tensor:
        return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPSILON)

    rounded = exact_sum.bfloat16()
    candidates = {
        "sum rounded, value rounded": normalised(rounded.float()).bfloat16() * weight,
        "sum rounded, value in FP32": (normalised(rounded.float()) * weight.float()).bfloat16(),
        "sum in FP32, value rounded": normalised(exact_sum).bfloat16() * weight,
        "sum and value in FP32": (normalised(exact_sum) * weight.float()).bfloat16(),
    }
    ops.fused_add_rms_norm(x, residual, weight, EPSILON)
    assert torch.equal(residual, rounded)
    compare(f"fused_add_rms_norm {tokens}", x, candidates)


@pytest.mark.parametrize("tokens", TOKENS)
def test_rms_norm(tokens: int) -> None:
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    x, weight = random(tokens, HIDDEN), random(HIDDEN)
    value = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPSILON)
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, EPSILON)
    candidates = {"value rounded": value.bfloat16() * weight, "value in FP32": (value * weight.float()).bfloat16()}
    compare(f"rms_norm {tokens}", out, candidates)


@pytest.mark.parametrize("tokens", TOKENS)
def test_rotary_embedding(tokens: int) -> None:
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    heads, kv_heads, size = 32, 8, 128
    positions = torch.randint(0, 16384, (tokens,), device="cuda")
    inverse = 1e6 ** -(torch.arange(0, size, 2, device="cuda").float() / size)
    angles = torch.arange(16384, device="cuda").float()[:, None] * inverse
    cache = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
    query, key = random(tokens, heads, size), random(tokens, kv_heads, size)
    cos, sin = (part.repeat(1, 2)[:, None] for part in cache[positions].chunk(2, -1))

    def rotated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x, c, s = x.to(dtype), cos.to(dtype), sin.to(dtype)
        first, second = x.chunk(2, -1)
        return (x * c + torch.cat((-second, first), -1) * s).bfloat16()

    candidates = [
        {"FP32, rounded once": rotated(x, torch.float32), "each product rounded": rotated(x, torch.bfloat16)}
        for x in (query, key)
    ]
    flat_query, flat_key = query.flatten(1).clone(), key.flatten(1).clone()
    ops.rotary_embedding(positions, flat_query, flat_key, size, cache, True)
    compare(f"rotary query {tokens}", flat_query.view_as(query), candidates[0])
    compare(f"rotary key {tokens}", flat_key.view_as(key), candidates[1])


@pytest.mark.parametrize("tokens", TOKENS)
def test_silu_and_mul(tokens: int) -> None:
    torch.manual_seed(0)
    both = random(tokens, 2 * 12288)
    gate, up = both.chunk(2, -1)
    out = torch.empty_like(gate)
    torch.ops._C.silu_and_mul(out, both)
    exact = gate.float() / (1 + (-gate.float()).exp())
    candidates = {
        "F.silu rounded, then the product": F.silu(gate) * up,
        "FP32, rounded once": (exact * up.float()).bfloat16(),
    }
    compare(f"silu_and_mul {tokens}", out, candidates)


@pytest.mark.parametrize("lengths", [(1,), (64,), (333, 17, 900), (4096,), (16384,)], ids=str)
def test_attention(lengths: tuple[int, ...]) -> None:
    """Packed sequences through vLLM's FlashAttention, each beside PyTorch's attentions alone. No operator of PyTorch
    has its order of sums: the nearest must be within what BF16 weights of the softmax allow."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    torch.manual_seed(0)
    heads, kv_heads, size, total = 32, 8, 128, sum(lengths)
    query, key, value = random(total, heads, size), random(total, kv_heads, size), random(total, kv_heads, size)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    longest = max(lengths)
    theirs = flash_attn_varlen_func(
        query, key, value, longest, starts, longest, cu_seqlens_k=starts, softmax_scale=size**-0.5, causal=True
    )
    module = torch.nn.Module()
    for length, start in zip(lengths, starts.tolist(), strict=False):
        rows = slice(start, start + length)
        q, k, v = (tensor[rows].transpose(0, 1)[None] for tensor in (query, key, value))
        sdpa = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)[0].transpose(0, 1)
        candidates = {"sdpa in BF16": sdpa}
        if length <= 4096:  # FP32 scores of 16k tokens would take 34 GB
            candidates["sdpa in FP32"] = fp32_attention(module, q, k, v, None, size**-0.5)[0][0]
        for name, ours in candidates.items():
            difference = (ours.float() - theirs[rows].float()).abs()
            share = (difference > 0).float().mean()
            print(f"attention {length:6} {name:16} differ {share:.2e}  mean {difference.mean():.2e}  "
                  f"max {difference.max():.2e}")  # fmt: skip
            assert difference.mean() < 1e-3 and difference.max() < 0.05


@pytest.mark.parametrize("tokens", TOKENS)
def test_lm_head(tokens: int) -> None:
    """vLLM's unquantized product is F.linear on every token that is sampled; the trainer's has other numbers of rows.
    What is asked: how much a row's logits depend on the rows beside it."""
    torch.manual_seed(0)
    hidden, weight = random(tokens, HIDDEN), random(151936, HIDDEN) / 64
    alone = torch.cat([F.linear(row[None], weight) for row in hidden[:64]])
    candidates = {"together": F.linear(hidden, weight)[:64], "with 2048 others": F.linear(
        torch.cat([hidden[:64], random(2048, HIDDEN)]), weight)[: len(alone)]}  # fmt: skip
    compare(f"lm_head {tokens}", alone, candidates)
