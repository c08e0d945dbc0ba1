"""The operators of level `model` on a GPU, as far as a CPU can show them: the PyTorch functions that stand for vLLM's
operators against vLLM's own CPU operators, its Triton kernel and float64; and the gradients.

test_align_cuda_level.py has the whole model. tests/gpu/test_align_cuda.py compares the operators themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract_checks import (
    TILE,
    add_rms_norm_reference,
    flash_reference,
    rms_norm_reference,
    rotary_reference,
    silu_and_mul_reference,
    stand_in_for_vllm,
)

from qarl.align import cuda
from qarl.kernels.cuda import layer_ops

pytest.importorskip("vllm")
BF16_STEP = 2**-7


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


@pytest.fixture(scope="module")
def operators() -> Any:
    """vLLM's operators with the same names on a CPU. Its norms have the same rounding there."""
    if missing := layer_ops.unavailable():
        pytest.skip(missing)
    return torch.ops._C


def differing(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The share of outputs that differ, none by more than a BF16 step."""
    step = (found.float() - expected.float()).abs()
    assert bool((step <= BF16_STEP * expected.float().abs() + 1e-6).all())
    return float((step > 0).float().mean())


@pytest.mark.parametrize("size", [128, 1024, 4096])
def test_norms_round_as_vllms_do(operators: Any, size: int) -> None:
    x, residual, weight = random(200, size), random(200, size, seed=1, scale=3), random(size, seed=2)
    found = torch.empty_like(x)
    operators.rms_norm(found, x, weight, 1e-6)
    assert differing(rms_norm_reference(x, weight, 1e-6), found) < 1e-3
    rounded_twice = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    assert float((rounded_twice.bfloat16() * weight != found).float().mean()) > 0.1
    # vLLM's CPU operator takes the variance from the unrounded sum, so only sums that need no rounding are compared.
    for exact in (False, True):
        parts = [torch.randint(-64, 64, x.shape).bfloat16() for _ in range(2)] if exact else [x, residual]
        ours, total = add_rms_norm_reference(*parts, weight, 1e-6)
        normed, summed = (part.clone() for part in parts)
        operators.fused_add_rms_norm(normed, summed, weight, 1e-6)
        assert torch.equal(total, summed)
        assert differing(ours, normed) < (1e-3 if exact else 1e-1)


def test_swiglu_rounds_as_vllms_does() -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    both = random(100, 2 * 320, scale=3)
    gate, up = both.chunk(2, -1)
    assert torch.equal(silu_and_mul_reference(gate, up), SiluAndMul.forward_native(both))
    once = (F.silu(gate.float()) * up.float()).bfloat16()
    assert float((once != silu_and_mul_reference(gate, up)).float().mean()) > 0.1


def test_the_rotary_formula_is_vllms_bit_for_bit(operators: Any) -> None:
    cache = torch.rand(600, 128, generator=torch.Generator().manual_seed(3)).mul(2).sub(1).bfloat16()
    positions = torch.randperm(600)
    x = random(600, 4, 128, scale=5)
    found = x.clone().flatten(1)
    operators.rotary_embedding(positions, found, x.clone().flatten(1), 128, cache, True)
    cosines, sines = cache[positions].chunk(2, -1)
    assert torch.equal(rotary_reference(x, cosines, sines).flatten(1), found)
    # transformers' formula on FP32 copies, which the trainer computes
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    doubled = [torch.cat((part, part), -1).float()[None] for part in (cosines, sines)]
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *doubled)
    assert torch.equal(theirs.bfloat16()[0].transpose(0, 1).flatten(1), found)


def attention_inputs(length: int, heads: int = 4, kv_heads: int = 2, size: int = 128) -> tuple[torch.Tensor, ...]:
    shapes = ((length, heads, size), (length, kv_heads, size), (length, kv_heads, size))
    return tuple(random(*shape, seed=i, scale=2.0 if i < 2 else 1.0) for i, shape in enumerate(shapes))


def exact_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (tensor.double().transpose(0, 1)[None] for tensor in (query, key, value))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=len(query) > 1, scale=scale, enable_gqa=True)
    return output[0].transpose(0, 1)


@pytest.mark.parametrize("length", [1, 16, 128, 129, 400])
def test_flash_attention_against_float64(length: int) -> None:
    inputs, scale = attention_inputs(length), 128**-0.5
    found, exact = flash_reference(*inputs, scale), exact_attention(*inputs, scale)
    error = (found.double() - exact).abs()
    assert float(error.max()) < 2e-2 and float(error.mean()) < 1e-3
    assert float((found.double() - exact).norm() / exact.norm()) < 4e-3


@pytest.mark.parametrize("length", [5, 128, 300])
def test_a_row_of_a_prefill_is_a_decode_step_if_the_tiles_are_the_same(length: int) -> None:
    """What one split gives: neither later tokens nor other queries change a row's bits. With other tiles they change,
    which is why heads of 64 are left out of `layer_ops.HEAD_SIZES`."""
    query, key, value = attention_inputs(length)
    prefill = flash_reference(query, key, value, 0.1)
    other = 0
    for place in {0, length // 2, length - 1}:
        rows = slice(0, place + 1)
        step = flash_reference(query[place : place + 1], key[rows], value[rows], 0.1)
        assert torch.equal(step[0], prefill[place])
        step = flash_reference(query[place : place + 1], key[rows], value[rows], 0.1, tile=160)
        other += int((step[0] != prefill[place]).sum())
    assert (other > 0) == (length > TILE)


@pytest.mark.parametrize("lengths", [(1,), (16,), (17, 1, 40), (5, 160, 16, 3)], ids=str)
def test_pages_hold_every_token_of_their_row(lengths: tuple[int, ...]) -> None:
    table, slots = layer_ops.pages(torch.tensor(lengths, dtype=torch.int32))
    assert table.dtype == torch.int32 and table.shape == (len(lengths), -(-max(lengths) // layer_ops.PAGE))
    tensor = random(sum(lengths), 2, 8)
    paged = layer_ops.into_pages(tensor, slots, int(table.max()) + 1)
    for pages, row in zip(table, tensor.split(lengths), strict=True):
        assert torch.equal(paged[pages].flatten(0, 1)[: len(row)], row)
    used = [pages[: -(-length // layer_ops.PAGE)].tolist() for pages, length in zip(table, lengths, strict=True)]
    flat = [page for pages in used for page in pages]
    assert sorted(flat) == list(range(len(paged)))


def test_the_call_fits_vllms_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the arguments, and shapes of the pages, on a function with the signature of vLLM 0.24.0."""
    seen: dict[str, Any] = {}

    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None,
        q_descale=None, k_descale=None, v_descale=None, num_splits=0, output_scale=None, fa_version=2, s_aux=None,
    ):  # fmt: skip
        seen.update(locals())
        return q

    module = type(sys)("vllm.vllm_flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", module)
    inputs = attention_inputs(20)
    assert layer_ops.flash_attention(*inputs, 0.25, (17, 3)) is not None
    assert (seen["fa_version"], seen["num_splits"], seen["causal"], seen["softmax_scale"]) == (3, 1, True, 0.25)
    assert seen["cu_seqlens_q"].tolist() == [0, 17, 20] and seen["seqused_k"].tolist() == [17, 3]
    assert seen["block_table"].tolist() == [[0, 1], [2, 0]] and seen["k"].shape == (3, 16, 2, 128)
    assert (seen["max_seqlen_q"], seen["max_seqlen_k"]) == (17, 17)


GRADIENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "norm": (
        lambda x, w: cuda._Norm.apply(x, w, 1e-6, True),
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        (random(3, 7, 96, scale=2), random(96, seed=1)),
    ),
    "SwiGLU": (
        lambda gate, up: cuda._SiluAndMul.apply(gate, up),
        lambda gate, up: F.silu(gate) * up,
        (random(9, 80, scale=2), random(9, 80, seed=1)),
    ),
    "attention": (
        lambda q, k, v: cuda._Flash.apply(q, k, v, 0.2, (30, 12)),
        lambda q, k, v: torch.cat([exact_attention(*(t[rows] for t in (q, k, v)), 0.2)
                                   for rows in (slice(0, 30), slice(30, 42))]),
        attention_inputs(42, size=32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_against_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_vllm(monkeypatch)
    function, exact, given = GRADIENTS[name]
    ours = [tensor.clone().requires_grad_() for tensor in given]
    truth = [tensor.double().requires_grad_() for tensor in given]
    output = function(*ours)
    grad = random(*output.shape, seed=9)
    output.backward(grad)
    exact(*truth).backward(grad.double())
    for found, expected in zip(ours, truth, strict=True):
        assert found.grad is not None and expected.grad is not None and found.grad.dtype == torch.bfloat16
        assert float((found.grad.double() - expected.grad).norm() / expected.grad.norm()) < 6e-3
