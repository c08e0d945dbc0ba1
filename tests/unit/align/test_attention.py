"""Attention at levels `model` and `exact` against vLLM's own operator."""

from __future__ import annotations

import pytest
import torch
from cpu_features import needs_engine_attention

from qarl.align.cpu import _sdpa, _TileAttention, engine_attention, fp32_attention
from qarl.kernels.cpu import layer_ops


def random_attention(
    rows: int, length: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 32, *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as transformers gives them to an attention function: [B, H, T, D], views of [B, T, H, D]."""
    torch.manual_seed(seed)
    shapes = [(rows, length, h, head_dim) for h in (heads, kv_heads, kv_heads)]
    query, key, value = (torch.randn(shape).bfloat16().transpose(1, 2) for shape in shapes)
    return query * 2, key * 2, value


@needs_engine_attention
@pytest.mark.parametrize("shape", [(3, 1), (5, 72), (2, 300)])
@pytest.mark.parametrize("heads", [(4, 2, 32), (4, 4, 64), (6, 2, 128)])
def test_attention_equals_the_engines_operator_on_a_prefill_of_each_row(shape, heads):
    """vLLM's attention backend with the metadata its builder makes for one prompt a time."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata, _get_attn_isa

    query, key, value = random_attention(*shape, *heads)
    num_heads, kv_heads, head_dim = heads
    length, scale = shape[1], head_dim**-0.5
    impl = CPUAttentionBackendImpl(num_heads, head_dim, scale, kv_heads, None, None, "auto")
    exact = engine_attention(torch.nn.Module(), query, key, value, None, scale)[0]
    close = fp32_attention(torch.nn.Module(), query, key, value, None, scale)[0]
    for row in range(shape[0]):
        layer = torch.nn.Module()
        layer.isa, layer._k_scale_float, layer._v_scale_float = _get_attn_isa(torch.bfloat16, 32, head_dim), 1.0, 1.0
        q, k, v = (tensor[row].transpose(0, 1).contiguous() for tensor in (query, key, value))
        kv_cache = torch.zeros(-(-length // 32), kv_heads, 32, 2 * head_dim, dtype=torch.bfloat16)
        starts, lengths = torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            1, num_heads, kv_heads, head_dim, lengths, torch.bfloat16, starts, True, -1, layer.isa, True
        )
        table = torch.arange(len(kv_cache), dtype=torch.int32)[None]
        slots = torch.arange(length)
        metadata = CPUAttentionMetadata(length, length, starts, length, lengths, table, slots, schedule)
        impl.do_kv_cache_update(layer, k, v, kv_cache, slots)
        expected = impl.forward(layer, q, k, v, kv_cache, metadata, torch.empty_like(q))
        assert torch.equal(exact[row], expected)
        # Vectors: PyTorch's own order, the scale after the product, would leave 4e-4 of them different. Tiles: they
        # sum neighbours apart, and a weight that rounds otherwise counts; weights in FP32 would leave 1e-1 different.
        tiles = layer_ops.uses_tiles("cpu", head_dim)
        assert (close[row] != expected).float().mean() < (1e-3 if tiles else 2e-4)
        torch.testing.assert_close(close[row], expected, rtol=2**-7, atol=1e-3 if tiles else 1e-6)


@needs_engine_attention
@pytest.mark.skipif(layer_ops.uses_tiles("cpu", 64), reason="the tile kernel differs in one output in 1,000")
@pytest.mark.parametrize("heads", [(4, 2, 32), (9, 3, 64), (16, 8, 128)])
@pytest.mark.parametrize("packed", [False, True])
def test_the_first_192_tokens_of_a_row_have_the_engines_bits(heads, packed):
    lengths = (*range(1, 193, 5), 15, 16, 17, 31, 32, 33, 176, 177, 191, 192, 193, 200, 256, 500)
    query, key, value = random_attention(1, sum(lengths), *heads)
    if not packed:
        row = [tensor[:, :, : max(lengths)] for tensor in (query, key, value)]
        query, key, value = (tensor.expand(len(lengths), -1, -1, -1) for tensor in row)
    given = {"row_lengths": lengths, "scaling": heads[-1] ** -0.5}
    exact, close = (
        attention(torch.nn.Module(), query, key, value, None, **given)[0]
        for attention in (engine_attention, fp32_attention)
    )
    if packed:
        exact, close = exact[0].split(lengths), close[0].split(lengths)
    for expected, found in zip(exact, close, strict=True):
        assert torch.equal(found[:192], expected[:192])
        assert (found != expected).float().mean() < 2e-4
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)


def test_queries_are_scaled_without_rounding():
    """By a scale that is no power of two a BF16 product would be off by half a percent of a score."""
    query, key, value = (tensor.bfloat16() for tensor in random_attention(2, 40))
    found = _sdpa(query, key, value, None, 0.3)
    groups = query.shape[1] // key.shape[1]
    q, k, v = (
        tensor.double() for tensor in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
    )
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3).transpose(1, 2)
    assert (found != exact.bfloat16()).float().mean() < 0.02
    fine = query.float() * (1 + 2**-10)  # between two BF16 numbers: the engine sees the nearer one
    assert torch.equal(_sdpa(fine, key, value, None, 0.3), found)


@needs_engine_attention
def test_the_engines_operator_gets_a_prompt_as_one_prefill_and_tokens_as_decodes(monkeypatch):
    """As in the rollout: with AMX tiles the bits are the same either way, with vectors they are not."""
    from vllm import _custom_ops as ops

    original, asked = ops.cpu_attn_get_scheduler_metadata, []
    monkeypatch.setattr(
        ops, "cpu_attn_get_scheduler_metadata", lambda **given: asked.append(given) or original(**given)
    )
    query, key, value = random_attention(1, 8)
    engine_attention(torch.nn.Module(), query, key, value, None, 0.2, prompt_lengths=torch.tensor([5]))
    (given,) = asked
    assert given["seq_lens"].tolist() == [5, 6, 7, 8] and given["query_start_loc"].tolist() == [0, 5, 6, 7, 8]


@needs_engine_attention
def test_a_row_of_attention_does_not_depend_on_the_rows_beside_it_or_on_what_follows():
    query, key, value = random_attention(6, 150)
    for attention in (engine_attention, fp32_attention):
        whole = attention(torch.nn.Module(), query, key, value, None, 0.2)[0]
        for rows in (slice(0, 1), slice(1, 4)):
            part = attention(torch.nn.Module(), query[rows], key[rows], value[rows], None, 0.2)[0]
            assert torch.equal(part, whole[rows])
    short = engine_attention(torch.nn.Module(), query[:, :, :70], key[:, :, :70], value[:, :, :70], None, 0.2)[0]
    assert torch.equal(short, engine_attention(torch.nn.Module(), query, key, value, None, 0.2)[0][:, :70])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("attention", [_sdpa, _TileAttention.apply], ids=["vectors", "tiles"])
def test_a_query_that_sees_no_key_gets_zeros_and_no_nan(attention, dtype):
    """Padding on the left: its NaN would be the next layer's values, and 0 * NaN every later token's output."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 6, 32, generator=generator).bfloat16().requires_grad_() for _ in range(3)]
    seen = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    seen[..., :2] = False
    mask = seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    output = attention(*inputs, mask, 0.2)
    assert output.shape == (1, 6, 2, 32) and not output[:, :2].any()
    alone = attention(*(tensor[:, :, 2:] for tensor in inputs), seen[..., 2:, 2:], 0.2)
    assert torch.equal(output[:, 2:], alone)
    output.float().square().sum().backward()
    for tensor in inputs:
        assert tensor.grad.isfinite().all() and tensor.grad[:, :, 2:].any() and not tensor.grad[:, :, :2].any()
