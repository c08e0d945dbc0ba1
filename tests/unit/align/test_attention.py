"""Attention at level `exact` against vLLM's own backend and float64, and the attention that stands in for it."""

from __future__ import annotations

import pytest
import torch
from cpu_features import needs_engine_attention

from qarl.align import attention_gradients
from qarl.align.attention_gradients import causal_gradients, pack_gradients
from qarl.align.cpu_attention import engine_attention, fp32_attention
from qarl.kernels.cpu import layer_ops
from qarl.kernels.cpu.layer_ops import Group, Row, _calls_of_groups, tokens_of_rows


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
    from vllm.v1.attention.backends.cpu_attn import (
        CPUAttentionBackendImpl,
        CPUAttentionMetadata,
        _get_attn_isa,
    )

    query, key, value = random_attention(*shape, *heads)
    num_heads, kv_heads, head_dim = heads
    length, scale = shape[1], head_dim**-0.5
    impl = CPUAttentionBackendImpl(num_heads, head_dim, scale, kv_heads, None, None, "auto")
    exact = engine_attention(torch.nn.Module(), query, key, value, None, scale)[0]
    close = fp32_attention(torch.nn.Module(), query, key, value, None, scale)[0]
    for row in range(shape[0]):
        layer = torch.nn.Module()
        layer.isa, layer._k_scale_float, layer._v_scale_float = (
            _get_attn_isa(torch.bfloat16, 32, head_dim),
            1.0,
            1.0,
        )
        q, k, v = (tensor[row].transpose(0, 1).contiguous() for tensor in (query, key, value))
        kv_cache = torch.zeros(-(-length // 32), kv_heads, 32, 2 * head_dim, dtype=torch.bfloat16)
        starts, lengths = (
            torch.tensor([0, length], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
        )
        schedule = ops.cpu_attn_get_scheduler_metadata(
            1,
            num_heads,
            kv_heads,
            head_dim,
            lengths,
            torch.bfloat16,
            starts,
            True,
            -1,
            layer.isa,
            True,
        )
        table = torch.arange(len(kv_cache), dtype=torch.int32)[None]
        slots = torch.arange(length)
        metadata = CPUAttentionMetadata(
            length, length, starts, length, lengths, table, slots, schedule
        )
        impl.do_kv_cache_update(layer, k, v, kv_cache, slots)
        expected = impl.forward(layer, q, k, v, kv_cache, metadata, torch.empty_like(q))
        assert torch.equal(exact[row], expected)
        # AMX multiplies values by weights that are rounded to BF16.
        rounding = value.abs().max().item() * 2**-9 if torch.cpu._is_amx_tile_supported() else 1e-3
        torch.testing.assert_close(close[row], expected, rtol=2**-7, atol=rounding)


@pytest.mark.parametrize("heads", [(4, 2, 32), (9, 3, 64), (2, 2, 16)])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 95, 96, 97, 200, 333])
@pytest.mark.parametrize("prefix", [0, 1, 70])
def test_gradients_equal_float64_autograd_at_every_border_of_a_block(prefix, length, heads):
    query, key, value = (
        tensor.double().requires_grad_() for tensor in random_attention(2, prefix + length, *heads)
    )
    unseen = torch.zeros(2, prefix, dtype=torch.bool)
    unseen[1, prefix // 2 :] = True
    mask = torch.ones(2, 1, length, prefix + length, dtype=torch.bool).tril(prefix)
    mask[..., :prefix] &= ~unseen[:, None, None]
    grad = torch.randn(2, heads[0], length, heads[2], dtype=torch.float64)
    output = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, prefix:], key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    expected = list(torch.autograd.grad(output, (query, key, value), grad))
    expected[0] = expected[0][:, :, prefix:]
    inputs = [query.detach()[:, :, prefix:].contiguous(), key.detach(), value.detach(), grad]
    inputs = [tensor.contiguous() for tensor in inputs]
    for ours, truth in zip(causal_gradients(*inputs, 0.3, unseen=unseen), expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    singles = causal_gradients(*(tensor.float() for tensor in inputs), 0.3, unseen=unseen)
    for ours, truth in zip(singles, expected, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)


SHARED = (
    Group.of(30, (3, 70, 0, 11)),
    Group.of(1, (5,)),
    Group.of(90, (65, 66)),
    Group.of(4, (0,)),
    Group.of(0, (9,)),
    Group((Row(90, 20, ((35, 60), (70, 71))), Row(24, 20))),
)


def rows_in_float64(groups, tensors):
    """Return the output of causal attention in float64, in the order of the pack, with its autograd: each row alone,
    with a copy of its prompt."""
    index = tokens_of_rows(groups)
    rows = [tensor[0].double()[:, index] for tensor in tensors]
    outputs, start = [], 0
    for group in groups:
        for number, (length, prompt, _) in enumerate(group.rows):
            row = [tensor[None, :, start : start + length] for tensor in rows]
            output = torch.nn.functional.scaled_dot_product_attention(
                *row, is_causal=True, scale=0.2, enable_gqa=True
            )[0].transpose(0, 1)
            outputs.append(output if number == 0 else output[prompt:])
            start += length
    return torch.cat(outputs)[None]


@pytest.mark.parametrize("scores", [1, 1 << 17])
def test_gradients_of_a_pack_are_those_of_float64_rounded_once(monkeypatch, scores):
    """Also where a prompt's keys get the gradients of four responses, and spans are padded to those beside them."""
    monkeypatch.setattr(attention_gradients, "_SCORES", scores)
    attention_gradients._sets.cache_clear()
    tokens = sum(group.tokens for group in SHARED)
    pack = [tensor.requires_grad_() for tensor in random_attention(1, tokens)]
    grad = torch.randn(1, tokens, 4, 32).bfloat16()
    exact = [tensor.detach().double().requires_grad_() for tensor in pack]
    expected = torch.autograd.grad(rows_in_float64(SHARED, exact), exact, grad.double())
    by_token = [tensor.detach()[0].transpose(0, 1) for tensor in pack]
    for ours, truth in zip(pack_gradients(*by_token, grad[0], 0.2, SHARED), expected, strict=True):
        truth = truth[0].transpose(0, 1)
        assert ours.dtype == torch.bfloat16
        rounding = (truth.bfloat16().double() - truth).norm()
        assert (ours.double() - truth).norm() <= 1.001 * rounding
    attention_gradients._sets.cache_clear()


@needs_engine_attention
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_that_share_a_prompt_have_the_bits_of_rows_with_prompts_of_their_own(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert layer_ops.longest_shared_prompt(32) >= 90
        tokens = sum(group.tokens for group in SHARED)
        pack = random_attention(1, tokens)
        lengths = tuple(group.tokens for group in SHARED)
        shared = engine_attention(
            torch.nn.Module(), *pack, None, 0.2, row_lengths=lengths, groups=SHARED
        )[0]
        index = tokens_of_rows(SHARED)
        alone = engine_attention(
            torch.nn.Module(),
            *(tensor[:, :, index] for tensor in pack),
            None,
            0.2,
            row_lengths=tuple(row.length for group in SHARED for row in group.rows),
            prompt_lengths=torch.tensor([group.prompt for group in SHARED for _ in group.rows]),
            later_prefills=[row.later for group in SHARED for row in group.rows],
        )[0]
        assert torch.equal(shared[:, index], alone)
    finally:
        torch.set_num_threads(before)


def test_rows_do_not_share_prompts_with_a_mask():
    pack = random_attention(1, 12)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    with pytest.raises(ValueError, match="cannot share prompts"):
        engine_attention(torch.nn.Module(), *pack, mask, 0.2, groups=(Group.of(2, (4, 6)),))


@needs_engine_attention
def test_each_row_of_a_pack_has_its_own_gradients():
    lengths = (3, 70, 1, 130)
    tensors = [tensor.requires_grad_() for tensor in random_attention(1, sum(lengths))]
    weight = torch.randn(1, sum(lengths), 4, 32).bfloat16()
    exact = {"scaling": 0.2, "row_lengths": lengths, "prompt_lengths": torch.tensor([2, 30, 1, 0])}
    results = []
    for attention, options in (
        (engine_attention, exact),
        (fp32_attention, {"scaling": 0.2, "row_lengths": lengths}),
    ):
        output = attention(torch.nn.Module(), *tensors, None, **options)[0]
        results.append(torch.autograd.grad(output, tensors, weight))
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, rtol=2**-7, atol=2**-7)


@needs_engine_attention
@pytest.mark.parametrize("case", ["mask", "cache"])
def test_what_the_operator_refuses_is_computed_in_fp32(case):
    query, key, value = random_attention(2, 12)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None] if case == "mask" else None
    query = query if case == "mask" else query[:, :, -1:]
    outputs = [
        attend(torch.nn.Module(), query, key, value, mask, 0.2)[0]
        for attend in (engine_attention, fp32_attention)
    ]
    assert torch.equal(*outputs) and outputs[0].any()


def test_queries_are_scaled_without_rounding():
    """By a scale that is no power of two a BF16 product would be off by half a percent of a score."""
    query, key, value = (tensor.bfloat16() for tensor in random_attention(2, 40))
    output = fp32_attention(torch.nn.Module(), query, key, value, None, 0.3)[0]
    groups = query.shape[1] // key.shape[1]
    q, k, v = (
        tensor.double()
        for tensor in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
    )
    exact = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.3
    ).transpose(1, 2)
    assert (output != exact.bfloat16()).float().mean() < 0.02
    fine = query.float() * (1 + 2**-10)  # between two BF16 numbers: the engine sees the nearer one
    assert torch.equal(fp32_attention(torch.nn.Module(), fine, key, value, None, 0.3)[0], output)


@needs_engine_attention
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_operands_are_rounded_once(operand):
    """1 + 2^-8 + 2^-12 is nearer to the BF16 number above it. Rounded to FP16 first, it would be halfway."""
    tensors = [tensor.float() for tensor in random_attention(2, 40)]
    tensors[operand] = tensors[operand].sign() * (1 + 2**-8 + 2**-12)
    rounded = [tensor.bfloat16() for tensor in tensors]
    for attention in (engine_attention, fp32_attention):
        output = attention(torch.nn.Module(), *tensors, None, 0.2)[0]
        assert torch.equal(output, attention(torch.nn.Module(), *rounded, None, 0.2)[0])


@needs_engine_attention
def test_the_engines_operator_gets_a_prompt_as_one_prefill_and_tokens_as_decodes(monkeypatch):
    """As in the rollout, whose bits are not those of a prefill of the whole row."""
    from vllm import _custom_ops as ops

    original, asked = ops.cpu_attn_get_scheduler_metadata, []
    monkeypatch.setattr(
        ops,
        "cpu_attn_get_scheduler_metadata",
        lambda **arguments: asked.append(arguments) or original(**arguments),
    )
    query, key, value = random_attention(1, 12)
    rows = {"row_lengths": (8, 4), "prompt_lengths": torch.tensor([5, 2])}
    engine_attention(torch.nn.Module(), query, key, value, None, 0.2, **rows)
    (arguments,) = asked
    assert arguments["seq_lens"].tolist() == [5, 6, 7, 8, 2, 3, 4]
    assert arguments["query_start_loc"].tolist() == [0, 5, 6, 7, 8, 10, 11, 12]
    assert (
        arguments["enable_kv_split"] is False
    )  # one thread has nothing to split: its bits would not tell


@needs_engine_attention
def test_a_row_of_attention_does_not_depend_on_the_rows_beside_it_or_on_what_follows():
    query, key, value = random_attention(6, 150)
    for attention in (engine_attention, fp32_attention):
        whole = attention(torch.nn.Module(), query, key, value, None, 0.2)[0]
        for rows in (slice(0, 1), slice(1, 4)):
            part = attention(torch.nn.Module(), query[rows], key[rows], value[rows], None, 0.2)[0]
            assert torch.equal(part, whole[rows])
    short = engine_attention(
        torch.nn.Module(), query[:, :, :70], key[:, :, :70], value[:, :, :70], None, 0.2
    )[0]
    assert torch.equal(
        short, engine_attention(torch.nn.Module(), query, key, value, None, 0.2)[0][:, :70]
    )


@pytest.mark.parametrize(
    ("threads", "rows", "calls"),
    [
        (1, [(720, 700), (37, 20), (4, 0)], [3]),
        (2, [(720, 700), (37, 20), (4, 0)], [1, 2]),
        (2, [(37, 32), (4, 0), (34, 33), (5, 1)], [2, 1, 1]),
        (1, [(4000, 1), (96, 1), (1, 1), (5000, 9), (2, 1)], [2, 1, 1, 1]),
    ],
)
def test_rows_share_a_call_where_none_of_them_can_be_cut(threads, rows, calls):
    """Several threads change a prompt of more than 32 tokens here. A call of several rows has at most 4,096 tokens."""
    groups = [Group((Row(*row),)) for row in rows]
    made = _calls_of_groups(tuple(groups), threads, 32)
    assert [len(call) for call in made] == calls
    assert [group for call in made for group in call] == groups


@needs_engine_attention
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_a_pack_has_the_bits_of_a_call_of_its_own(threads):
    """With two threads and 700 keys, the operator would cut a prompt where the other rows end a thread's share."""
    rows = ((720, 700), (37, 20), (1, 1), (790, 623), (50, 30), (9, 0), (4100, 4096))
    lengths, prompts = zip(*rows, strict=True)
    pack = random_attention(1, sum(lengths), 6, 2, 128)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        options = {"scaling": 0.1, "row_lengths": lengths, "prompt_lengths": torch.tensor(prompts)}
        whole = engine_attention(torch.nn.Module(), *pack, None, **options)[0]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        for (length, prompt), end in zip(rows, ends, strict=True):
            row = [tensor[:, :, end - length : end] for tensor in pack]
            alone = engine_attention(
                torch.nn.Module(), *row, None, 0.1, prompt_lengths=torch.tensor([prompt])
            )[0]
            assert torch.equal(alone, whole[:, end - length : end]), (length, prompt)
    finally:
        torch.set_num_threads(before)


@needs_engine_attention
def test_padding_has_no_output_and_no_gradient():
    tensors = [tensor.detach().requires_grad_() for tensor in random_attention(3, 70)]
    options = {
        "scaling": 0.2,
        "row_lengths": (70, 5, 64),
        "prompt_lengths": torch.tensor([3, 5, 0]),
    }
    output = engine_attention(torch.nn.Module(), *tensors, None, **options)[0]
    gradients = torch.autograd.grad(output, tensors, torch.ones_like(output))
    for row, length in enumerate(options["row_lengths"]):
        assert output[row, :length].any() and not output[row, length:].any()
        assert all(
            gradient[row, :, :length].any() and not gradient[row, :, length:].any()
            for gradient in gradients
        )


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_query_that_sees_no_key_gets_zeros_and_no_nan(dtype):
    """Padding on the left: its NaN would be the next layer's values, and 0 * NaN every later token's output."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, 2, 6, 32, generator=generator).bfloat16().requires_grad_() for _ in range(3)
    ]
    seen = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    seen[..., :2] = False
    mask = seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    output = fp32_attention(torch.nn.Module(), *inputs, mask, 0.2)[0]
    assert output.shape == (1, 6, 2, 32) and not output[:, :2].any()
    inner = [tensor[:, :, 2:] for tensor in inputs]
    alone = fp32_attention(torch.nn.Module(), *inner, seen[..., 2:, 2:], 0.2)[0]
    assert torch.equal(output[:, 2:], alone)
    output.float().square().sum().backward()
    for tensor in inputs:
        assert (
            tensor.grad.isfinite().all()
            and tensor.grad[:, :, 2:].any()
            and not tensor.grad[:, :, :2].any()
        )


def test_the_requests_of_a_row() -> None:
    """A row of 9 tokens: 3 prefilled, then decoded but for the two at places 5 and 6, which came at once."""
    assert Row(9, 3).ends.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert Row(9, 3, ((5, 7),)).ends.tolist() == [3, 4, 5, 7, 8, 9]
    assert Row(9, 3, ((4, 6), (7, 9))).ends.tolist() == [3, 4, 6, 7, 9]
    assert Row(3, 0).ends.tolist() == [1, 2, 3]
    assert (Row(9, 3).longest_prefill, Row(9, 3, ((5, 7),)).longest_prefill) == (3, 7)


@needs_engine_attention
def test_a_later_prefill_is_one_request_of_the_operator() -> None:
    """Behind 1000 keys, with heads of 128, the queries of a part that is prefilled at once have other bits than decoded
    ones. All others have the same."""
    pack = random_attention(1, 1500, 6, 2, 128)
    options = {"scaling": 0.1, "row_lengths": (1500,), "prompt_lengths": torch.tensor([900])}
    decoded = engine_attention(torch.nn.Module(), *pack, None, **options)[0]
    parts = engine_attention(
        torch.nn.Module(), *pack, None, **options, later_prefills=[((1000, 1400),)]
    )[0]
    outside = [*range(1000), *range(1400, 1500)]
    assert torch.equal(parts[:, outside], decoded[:, outside])
    assert not torch.equal(parts, decoded)
    assert torch.allclose(parts.float(), decoded.float(), atol=0.02)
