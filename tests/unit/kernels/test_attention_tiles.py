"""The longest prompt that no cut changes: by numbers worked by hand, and beside vLLM's own operator near the border."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from qarl.kernels.cpu.attention_tiles import (
    TILINGS,
    instruction_set,
    l2_cache_bytes,
    longest_exact_prompt,
    longest_uncut,
)
from qarl.kernels.cpu.layer_ops import attention_unavailable
from qarl.process import configure_vllm_process

BLOCK = 32
SHAPES = [(9, 3, 64), (8, 8, 64), (16, 2, 64), (4, 2, 128), (8, 2, 96), (4, 2, 80), (4, 2, 256)]
"""Query heads, key heads, head size. The first is SmolLM2-135M's, whose three query heads do not share a tile."""


@pytest.mark.parametrize(
    ("head_size", "tokens"),
    [
        # Half of 1 MiB is 524288 bytes. A row of queries: 64 * (4 + 4) = 512; a key and a value: 2 * 64 * 2 = 256; its
        # scores: 8 * 4 = 32. 524288 // 800 = 655, so 648 rows; (524288 - 648 * 512) // 288 = 668, so 640 keys.
        (64, 640),
        # 1024, 512, 32: 524288 // 1568 = 334, so 328 rows; (524288 - 328 * 1024) // 544 = 346, so 320 keys.
        (128, 320),
        # 256, 128, 32: 1260 rows, of which 128 * 8 = 1024 are allowed; (524288 - 1024 * 256) // 160 = 1638, so 1632.
        (32, 1632),
    ],
)
def test_by_hand(head_size: int, tokens: int) -> None:
    assert longest_uncut(head_size, l2_bytes=2**20, tiling=TILINGS["vec"]) == tokens


def test_a_tiny_cache_has_the_smallest_tile() -> None:
    assert longest_uncut(256, l2_bytes=2**10, tiling=TILINGS["vec"]) == 32


def test_the_cache_is_the_one_that_pytorch_reports() -> None:
    assert l2_cache_bytes() == torch.cpu.get_capabilities()["l2_cache_size"]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def attended(
    heads: tuple[int, int, int],
    length: int,
    ends: Sequence[int],
    *,
    beside: int = 0,
    strong: int = 0,
) -> torch.Tensor:
    """Return the attention of one prompt, computed as requests that end at `ends`, with other prompts beside it.

    A request sees all keys before its end, as behind a cached prefix. `beside`: number of other prompts of this length.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    query_heads, key_heads, size = heads
    rows = 1 + beside
    query, key, value = (
        torch.cat([random_row(length, count, size, seed=row) for row in range(rows)])
        for count in (query_heads, key_heads, key_heads)
    )
    blocks = -(-length // BLOCK)
    isa = _get_attn_isa(torch.bfloat16, BLOCK, size)
    cache = query.new_zeros(rows * blocks, key_heads, 2 * BLOCK, size)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = torch.cat([torch.arange(length) + row * blocks * BLOCK for row in range(rows)])
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
    key_ends = torch.tensor([*ends, *[length] * beside], dtype=torch.int32)
    query_ends = torch.tensor([*ends, *(length * (row + 2) for row in range(beside))])
    starts = torch.cat([query_ends.new_zeros(1), query_ends]).int()
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(key_ends),
        num_heads=query_heads,
        num_kv_heads=key_heads,
        head_dim=size,
        seq_lens=key_ends,
        dtype=torch.bfloat16,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=False,
    )
    own = torch.arange(blocks, dtype=torch.int32).expand(len(ends), blocks)
    others = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)[1:]
    output = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=starts,
        seq_lens=key_ends,
        scale=size**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=torch.cat([own, others]),
        softcap=0.0,
        scheduler_metadata=schedule,
        s_aux=None,
    )
    return output[:length]


def random_row(length: int, count: int, size: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, count, size, generator=generator).bfloat16()


def cuts(length: int) -> list[list[int]]:
    """Return prompts in one piece, behind cached prefixes of several lengths, in blocks, and token by token."""
    prefixes = [[prefix, length] for prefix in (1, 8, 32, length // 2, length - 8, length - 1)]
    in_blocks = [*range(BLOCK, length, BLOCK), length]
    return [[length], *prefixes, in_blocks, list(range(1, length + 1))]


def needs_operator(heads: tuple[int, int, int]) -> int:
    """Return the border for these heads. Skip the test where vLLM's operator is missing."""
    if missing := attention_unavailable("cpu", heads[2]):
        pytest.skip(missing)
    configure_vllm_process()
    return longest_exact_prompt(heads[2])


@pytest.mark.parametrize("heads", SHAPES)
def test_no_cut_changes_a_bit_up_to_the_border(heads: tuple[int, int, int], threads: int) -> None:
    border = needs_operator(heads)
    for length in (border, border - 1, border // 2):
        expected = attended(heads, length, [length])
        for ends in cuts(length):
            assert torch.equal(attended(heads, length, ends), expected), (length, ends[:2])
        assert torch.equal(attended(heads, length, [length], beside=2), expected)


@pytest.mark.parametrize("size", [64, 80, 96, 128])
def test_a_cut_changes_bits_soon_behind_the_border(size: int) -> None:
    """Otherwise the function would be too cautious. Few outputs round differently, so there are many heads."""
    if instruction_set(size) == "amx":
        pytest.skip("the operator rounds probabilities to BF16 there, which hides most differences")
    heads = (96, 96, size)
    border = needs_operator(heads)
    length = border + 64
    # Behind a prefix of 56 tokens the queries fill the largest tile, which has the smallest tile of keys.
    whole = attended(heads, length, [length])
    behind_prefix = attended(heads, length, [56, length])
    assert not torch.equal(whole, behind_prefix)
