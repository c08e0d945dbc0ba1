"""vLLM's attention and rotary embedding on a CPU, without an engine. The same operands give the engine's bits.

Attention. The engine stores keys and values in a paged cache. `causal_attention` makes such a cache for the rows
(sequences) of a pack. In long rows the order of the operator's sums depends on the number of queries in a request
(`qarl.kernels.cpu.attention_tiles`). So the prompt is one request here, as in the engine's prefill, and each response
token is one request, as in its decoding. `causal_attention` is batch-invariant, because rows share a call only where no
cut of a prompt changes its bits (`_calls_of_rows`), and the keys of one query are never split among threads
(`enable_kv_split` is false, here and by `qarl.process` in the engine). With several threads the engine's prefill of
long prompts is not batch-invariant, because one call computes several of them. The operator has no autograd.
`qarl.align.cpu_attention` adds it.

Rows of a pack may share their prompt (`Group`). Its tokens are then in the pack once, and are computed once. Each row
still has keys and values of its own in the cache, where the engine would have put them.

Rotary embedding. It is compared with transformers' (`qarl.align.rotary`). The two read different config keys, and may
compute different angles from the same keys. For example, vLLM's `dynamic` changes the base for every length, but
transformers' `dynamic` only beyond the trained length.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from qarl.kernels.cpu.attention_tiles import longest_exact_prompt
from qarl.process import configure_vllm_process, vllm_missing

BLOCK_SIZE = 128  # vLLM's default on CPU (cache_config.block_size); results do not depend on it
_TOKENS = 4096
"""Number of tokens of a call, so that its cache stays small. A longer row is a call of its own."""


@cache
def head_sizes() -> tuple[int, ...]:
    """Return the head sizes that vLLM's attention on a CPU has, as its backend lists them."""
    configure_vllm_process()
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return tuple(CPUAttentionBackend.get_supported_head_sizes())


@cache
def attention_unavailable(device_type: str, head_size: int) -> str | None:
    """Return why the engine's attention cannot be called for this device and head size, or None if it can."""
    if device_type != "cpu":
        return f"QaRL calls vLLM's attention only on cpu, not on {device_type}"
    if missing := vllm_missing():
        return missing
    configure_vllm_process()
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C

    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return "this vLLM build has no cpu_attention_with_kv_cache"
    if head_size not in head_sizes():
        return f"vLLM's attention on CPU has no head size {head_size}"
    return None


class _Call(NamedTuple):
    """The arguments of a call of the operator for `tokens` tokens of whole groups, which no layer changes.

    `cached`: int64; which of these tokens is at each of the `slots`, or None if they are in order.
    """

    tokens: int
    blocks: int
    cached: torch.Tensor | None
    slots: torch.Tensor
    query_starts: torch.Tensor
    key_ends: torch.Tensor
    block_table: torch.Tensor
    schedule: torch.Tensor


class Row(NamedTuple):
    """A row of a pack: its number of tokens, and how the engine computed them.

    prompt  number of tokens at its start that the engine prefilled, or 0 if it decoded the whole row
    later   start and end of each later part that it prefilled at once, behind the keys and values before it. All other
            tokens were decoded
    """

    length: int
    prompt: int
    later: tuple[tuple[int, int], ...] = ()

    @property
    def ends(self) -> torch.Tensor:
        """The end of each request's queries, int32 [requests]: of a prefill its last token, else each token."""
        ends = torch.arange(max(self.prompt, 1), self.length + 1, dtype=torch.int32)
        for start, end in self.later:
            ends = ends[(ends <= start) | (ends >= end)]
        return ends

    @property
    def longest_prefill(self) -> int:
        """Number of keys that the last query of the longest prefill sees."""
        return max(self.prompt, *(end for _, end in self.later)) if self.later else self.prompt


class Group(NamedTuple):
    """Rows with the same prompt in a pack, which has the tokens of the prompt, and then those of each response."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, prompt: int, responses: Sequence[int]) -> Group:
        """Return the rows of responses of these lengths, which have been decoded, to a prompt of this length."""
        return cls(tuple(Row(prompt + response, prompt) for response in responses))

    @property
    def prompt(self) -> int:
        """The number of tokens of the prompt."""
        return self.rows[0].prompt

    @property
    def responses(self) -> tuple[int, ...]:
        """The number of tokens of each response."""
        return tuple(row.length - row.prompt for row in self.rows)

    @property
    def tokens(self) -> int:
        """The number of tokens in the pack."""
        return self.prompt + sum(self.responses)

    @property
    def requests(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The requests of each row, int32 [requests]: number of queries, and the end of `Row.ends`. The prompt is a
        request of the first row."""
        requests = []
        for number, row in enumerate(self.rows):
            ends = row.ends
            before = ends.new_zeros(1)
            if number and row.prompt:
                before = ends[:1]
                ends = ends[1:]
            requests.append((ends.diff(prepend=before), ends))
        return requests


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    groups: tuple[Group, ...],
) -> torch.Tensor:
    """Compute a pack's BF16 [T, H, D] from query BF16 [T, H, D], key and value BF16 [T, Hkv, D], any strides."""
    from vllm import _custom_ops as ops

    heads, head_size, kv_heads = *query.shape[1:], key.shape[1]
    isa, calls = _calls(groups, heads, kv_heads, head_size, torch.get_num_threads())
    output = query.new_empty(query.shape)
    sizes = [call.tokens for call in calls]
    query = query.contiguous()
    for call, q, k, v, out in zip(
        calls, *(t.split(sizes) for t in (query, key, value, output)), strict=True
    ):
        # The cache must start as zeros, because the operator also multiplies masked places, and NaN times zero is NaN.
        cache = query.new_zeros(call.blocks, kv_heads, 2 * BLOCK_SIZE, head_size)
        key_cache, value_cache = cache.chunk(2, dim=2)
        if call.cached is not None:
            k, v = (tensor.index_select(0, call.cached) for tensor in (k, v))
        ops.cpu_attn_reshape_and_cache(k, v, key_cache, value_cache, call.slots, isa)
        ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=call.query_starts,
            seq_lens=call.key_ends,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=call.block_table,
            softcap=0.0,
            scheduler_metadata=call.schedule,
            s_aux=None,
        )
    return output


@lru_cache(maxsize=4)  # all layers of a forward have the same rows
def _calls(
    groups: tuple[Group, ...], heads: int, kv_heads: int, head_size: int, threads: int
) -> tuple[str, list[_Call]]:
    """Return the operator's instruction set and its calls for these groups, in their order."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(torch.bfloat16, BLOCK_SIZE, head_size)
    calls = []
    for together in _calls_of_groups(groups, threads, longest_exact_prompt(head_size)):
        lengths = torch.tensor([row.length for group in together for row in group.rows])
        row_blocks = (lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
        first_blocks = row_blocks.cumsum(0) - row_blocks
        queries, ends = zip(*(row for group in together for row in group.requests), strict=True)
        requests = torch.tensor([len(row) for row in ends])
        key_ends = torch.cat(ends)
        query_starts = F.pad(torch.cat(queries).cumsum(0), (1, 0)).int()
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(key_ends),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_size,
            seq_lens=key_ends,
            dtype=torch.bfloat16,
            query_start_loc=query_starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=False,
        )
        blocks = int(row_blocks.sum())
        slots = torch.cat([torch.arange(length) for length in lengths.tolist()])
        slots += (first_blocks * BLOCK_SIZE).repeat_interleave(lengths)
        # Beyond a row's last block, the table has blocks that the operator does not read.
        table = (
            (first_blocks[:, None] + torch.arange(int(row_blocks.max())))
            .clamp(max=blocks - 1)
            .int()
        )
        block_table = table.repeat_interleave(requests, 0)
        tokens = sum(group.tokens for group in together)
        cached = None if len(slots) == tokens else tokens_of_rows(together)
        calls.append(
            _Call(tokens, blocks, cached, slots, query_starts, key_ends, block_table, schedule)
        )
    return isa, calls


def tokens_of_rows(groups: Sequence[Group]) -> torch.Tensor:
    """Return the index in the pack of each token of the rows, int64, row by row with its prompt."""
    tokens = []
    start = 0
    for group in groups:
        prompt = torch.arange(start, start + group.prompt)
        start += group.prompt
        for response in group.responses:
            tokens += [prompt, torch.arange(start, start + response)]
            start += response
    return torch.cat(tokens)


def _calls_of_groups(
    groups: tuple[Group, ...], threads: int, longest_exact: int
) -> list[list[Group]]:
    """Distribute groups over calls. With several threads, a call with a prompt of more than `longest_exact` tokens has
    no other row.

    The operator gives each thread an equal share of a call's keys, and cuts a prompt where a share ends. So the bits of
    a long prompt would depend on the rows beside it.
    """
    calls: list[list[Group]] = []
    alone = True
    tokens = 0
    for group in groups:
        size = sum(row.length for row in group.rows)
        longest = max(row.longest_prefill for row in group.rows)
        cut = threads > 1 and longest > longest_exact
        if alone or cut or tokens + size > _TOKENS:
            calls.append([])
            tokens = 0
        calls[-1].append(group)
        alone = cut
        tokens = tokens + size
    return calls


def longest_shared_prompt(head_size: int) -> int:
    """Return the largest number of tokens that the engine has prefilled in rows that share a prompt. With one thread
    there is no limit. With several, a longer prefill needs a call without other rows."""
    return sys.maxsize if torch.get_num_threads() == 1 else longest_exact_prompt(head_size)


def engine_rotary(config: Any, head_size: int) -> Any:
    """Build vLLM's rotary module from this transformers config, as vLLM's Llama, Qwen2 and Qwen3 models do.

    vLLM keeps each module and returns it to later callers. So the result may be a module of an engine in this process,
    whose buffers are not readable while that engine sleeps. A new module is not left to engines that start later,
    because they would use its table, which may have been computed on a different device.

    Raise ValueError or KeyError if vLLM rejects the config's `rope_parameters`.
    """
    configure_vllm_process()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.transformers_utils.config import patch_rope_parameters

    config = copy.deepcopy(config)
    patch_rope_parameters(config)
    modules: dict[Any, Any] = getattr(rotary_embedding, "_ROPE_DICT", {})
    before = set(modules)
    with set_current_vllm_config(VllmConfig()):
        rotary = rotary_embedding.get_rope(
            head_size,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            dual_chunk_attention_config=getattr(config, "dual_chunk_attention_config", None),
            dtype=torch.bfloat16,
        )
    for key in set(modules) - before:
        del modules[key]
    return rotary


def computed_turns(rotary: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the cosines and sines of the engine's table on a device, BF16 [positions, D / 2] each.

    vLLM computes its table on the engine's device. A GPU's powers and cosines differ a little from a CPU's.
    """
    with device:
        table: torch.Tensor = rotary._compute_cos_sin_cache()
    cosines, sines = table.bfloat16().chunk(2, dim=-1)
    return cosines, sines


def engine_turn(rotary: Any, positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Rotate `query`, BF16 [T, D], to `positions` [T] with the engine's operator. Return BF16 [T, D]."""
    from vllm.platforms import current_platform

    # On a CPU vLLM calls `forward_cpu` if it does not compile the model; builds for GPUs lack its operator.
    # Classes with neither method are plain modules.
    call = getattr(rotary, "forward_cpu" if current_platform.is_cpu() else "forward_native", rotary)
    turned: torch.Tensor = call(positions, query.clone(), query.clone())[0]
    return turned.view(query.shape)


def turn(
    query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate copies of query and key, BF16 [B, T, heads, D], with the engine's operator.

    `cosines`, `sines`: BF16 [B or 1, T, D], whose halves are equal. The operator reads them like the rows of its table.
    """
    size = query.shape[-1]
    table = torch.cat([cosines[..., : size // 2], sines[..., : size // 2]], -1).expand(
        *query.shape[:2], -1
    )
    turned = [tensor.clone(memory_format=torch.contiguous_format) for tensor in (query, key)]
    positions = torch.arange(query.shape[0] * query.shape[1])
    rows = (tensor.view(len(positions), -1) for tensor in turned)
    torch.ops._C.rotary_embedding(positions, *rows, size, table.reshape(len(positions), size), True)
    return turned[0], turned[1]


def cached_turns(rotary: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the cosines and sines of the engine's table, BF16 [positions, D / 2] each.

    Return None if the class of `rotary` has no such table.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if (
        not isinstance(rotary, RotaryEmbedding)
        or type(rotary).forward_cpu is not RotaryEmbedding.forward_cpu
    ):
        return None
    cosines, sines = rotary.cos_sin_cache.chunk(2, dim=-1)
    return cosines, sines
