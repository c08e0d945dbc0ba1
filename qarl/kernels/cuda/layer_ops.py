"""The CUDA operators of a decoder layer that engine and trainer both run.

    rms_norm            QaRL's (`qarl.kernels.triton.norms`), because a row of vLLM's depends on the number of rows
    silu_and_mul        vLLM's `silu_and_mul`
    flash_attention     vLLM's FlashAttention 3, with pages of keys and values, and one split
    router_logits       of a mixture of experts: QaRL's (`qarl.kernels.triton.router`), which the engine runs too
                        (`qarl.rollout.vllm_plugin.cuda_experts`), because cuBLAS may split sums by the number of tokens
    chosen_experts      of a mixture of experts: vLLM's `topk_softmax`

A contract (docs/understand/cuda.md) says which intermediate results are BF16 and which are FP32. The checks in
tests/support/contract_checks.py follow the contracts in PyTorch, so that the level can be tested without a GPU. The
contracts are read from the source of the release in requirements/gpu.lock.

Equal contracts do not mean equal bits: a contract leaves the order of FP32 sums open. So `quant.align=model` on a GPU
calls the engine's operators, and the contracts say what to expect from them. Only a device can confirm that:
`CONTRACTS` names the results. An operator without a file makes the level unconfirmed, in the log and the doctor.

A decoder layer of transformers has added the residual already when it calls its norm. The engine adds it in the norm's
operator, which normalises the rounded sum. So both get the same bits from one kernel.

The engine's attention reads a paged cache. Its kernel for pages of 16 tokens has tiles of 128 keys, both in a prefill
and in a decode step, for heads of 96 and 128, and for smaller ones by `least_queries`; with heads of 256 both give the
same bits, too. The kernel for contiguous keys may have other tiles, and so other bits. So the trainer's keys and values
are copied into such pages. By default the engine splits the keys of a query among thread blocks if few requests run.
Then the sum's order depends on the batch. With one split it does not. On compute capability 9.0 QaRL's backend for vLLM
asks for that (`qarl.rollout.vllm_plugin.cuda_attention`). FlashAttention 2 and 4 take the number of splits from a
heuristic that only VLLM_BATCH_INVARIANT reaches, which replaces operators of the whole process.

Sources for attention: vllm/v1/attention/backends/flash_attn.py, vllm/vllm_flash_attn/flash_attn_interface.py of
vLLM; hopper/tile_size.h and hopper/flash_api.cpp of vllm-project/flash-attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from qarl.kernels.base import upload
from qarl.process import configure_vllm_process, vllm_missing

NORM_PROVIDER = "qarl"
"""The name under which vLLM knows QaRL's RMSNorm (`qarl.rollout.vllm_plugin.cuda_operators`)."""
NORMS = ("rms_norm", "fused_add_rms_norm")
"""vLLM's operators that it replaces."""
ENGINE_ARGUMENTS: dict[str, Any] = {
    "attention_config": {"backend": "CUSTOM"},
    "ir_op_priority": {name: [NORM_PROVIDER] for name in NORMS},
}
"""vLLM's arguments that make its engine run these operators, beside those that keep it from compiling
(`qarl.rollout.engine_config.GRAPHS`): compiled models have PyTorch's formulas, which round differently.

`CUSTOM` is vLLM's name for the attention of a plugin: FlashAttention with one split and one tile, by
`qarl.rollout.vllm_plugin.cuda_attention`. `ir_op_priority` puts QaRL's norms before vLLM's.
"""

CONTRACTS = {
    "QaRL's rms_norm": "",
    "rotary_embedding": "gpu_check_2026-11-27.json",
    "silu_and_mul": "gpu_check_2026-11-27.json",
    "FlashAttention 3, one split": "gpu_check_2026-11-27.json",
    "one split in every step": "",
    "gradient of FlashAttention 3": "",
    "F.linear, cuBLAS": "gpu_check_2026-11-27.json",
    "compute_token_logprobs": "gpu_check_2026-11-27.json",
}
"""The engine's operator -> the file under benchmarks/results in which a device has confirmed its contract, or empty.
docs/understand/cuda.md has the contracts: what each operator rounds, and what that leaves open."""


EXPERTS_CONTRACTS = {
    "QaRL's router_logits": "",
    "topk_softmax": "",
    "experts of vLLM's CUTLASS": "",
    "QaRL's own experts": "",
}
"""The same for what only a mixture of experts has."""


def unconfirmed(*, experts: bool = False) -> tuple[str, ...]:
    """Return the operators that no device has confirmed. `experts`: also those of a mixture of experts."""
    contracts = CONTRACTS | (EXPERTS_CONTRACTS if experts else {})
    return tuple(operator for operator, file in contracts.items() if not file)


OPERATORS = ("silu_and_mul", "rotary_embedding")


@cache
def unavailable() -> str | None:
    """Return why vLLM's operators cannot be called in this process, or None if they can. A GPU is not needed."""
    if missing := vllm_missing():
        return missing
    configure_vllm_process()
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C

    missing_ops = [name for name in OPERATORS if not hasattr(torch.ops._C, name)]
    return f"this vLLM build has no {', '.join(missing_ops)}" if missing_ops else None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the norm of x BF16 [..., K] with weight BF16 [K], as BF16. Behind a residual addition x is the sum."""
    from qarl.kernels.triton import norms

    return norms.rms_norm(x, weight, epsilon)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, weight_too: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return dX BF16 [..., K], and dW FP32 [K], or None without `weight_too`."""
    from qarl.kernels.triton import norms

    return norms.rms_norm_backward(grad, x, weight, epsilon, weight_too=weight_too)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up as BF16, for gate and up BF16 [..., N]."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    torch.ops._C.silu_and_mul(out, torch.cat((gate, up), dim=-1))
    return out


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a router's logits, BF16 [T, E], from x BF16 [T, H] and weight BF16 [E, H]."""
    from qarl.kernels.triton.router import router_logits

    return router_logits(x, weight)


def chosen_experts(
    logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights, FP32 [T, k], and numbers, int32 [T, k], of each token's likeliest experts, from `logits` BF16
    [T, E]. The likeliest is first, and of equal ones that with the lower number."""
    from vllm import _custom_ops as ops

    shape = (len(logits), top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    experts, unused = (torch.empty(shape, dtype=torch.int32, device=logits.device) for _ in "xx")
    ops.topk_softmax(weights, experts, unused, logits, renormalize)
    return weights, experts


PAGE = 16
"""Tokens in a page: vLLM's default block size on GPUs."""
HEAD_SIZES = (96, 128, 256)
"""Head sizes for which a decode step has the bits of a prefill, up to 5,000 keys on an H200. With heads of 64 18% of
the outputs differed by a rounding there, before `least_queries`."""
HEAD_MULTIPLE = 8
LARGEST_HEAD = 256
"""FlashAttention 3 has heads of a multiple of 8, up to this size. For others vLLM chooses another backend. A test
compares this with vLLM's own rule."""
CAPABILITY = (9, 0)


def has_head_size(size: int) -> bool:
    """Return whether FlashAttention 3 has heads of this size."""
    return size % HEAD_MULTIPLE == 0 and size <= LARGEST_HEAD


def attention_unavailable(capability: tuple[int, int] | None) -> str | None:
    """Return why the engine's attention cannot be called on a GPU of this compute capability, or None if it can.

    `capability`: None if unknown, which counts as available.
    """
    if missing := vllm_missing():
        return missing
    if capability is not None and capability != CAPABILITY:
        return (
            "is built for compute capability 9.0, where vLLM runs FlashAttention 3 and can be told to use one split, "
            f"not for {capability[0]}.{capability[1]}"
        )
    return None


def least_queries(size: int) -> int:
    """Return the least number of queries that a call may name as the largest of its rows, for heads of this size.

    For heads of up to 64, FlashAttention 3 has other tiles of keys in a call whose largest row has one query, or few
    enough to fit into one warp group: 160 or 192 keys instead of 128 (hopper/flash_api.cpp, heuristics.h, tile_size.h).
    With a larger number, which is only a bound, a decode step has the tile of a prefill. The number of rows in a warp
    group is 64."""
    return 65 if size <= 64 else 1


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    lengths: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention within each row of a pack, BF16 [T, H, D], and the logarithms of its sums, FP32 [H, T].

    query is BF16 [T, H, D], key and value are BF16 [T, Hkv, D]. `lengths`: tokens of each row; their sum is T.
    """
    configure_vllm_process()
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    pack = _pack(tuple(lengths), query.device)
    caches = [into_pages(tensor, pack.slots, pack.pages) for tensor in (key, value)]
    longest = max(lengths)
    output, log_sums = flash_attn_varlen_func(
        q=query.contiguous(),
        k=caches[0],
        v=caches[1],
        cu_seqlens_q=pack.ends,
        max_seqlen_q=max(longest, least_queries(query.shape[-1])),
        seqused_k=pack.counts,
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=True,
        block_table=pack.table,
        return_softmax_lse=True,
        fa_version=3,
        num_splits=1,
    )
    return output, log_sums


def flash_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    scale: float,
    lengths: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value from those of `output` BF16 [T, H, D].

    PyTorch's FlashAttention 2 computes them from what the forward returned, so it need not compute attention again.
    Both versions mean the same by `log_sums`: the natural logarithm of the sum of exp(scale * score).
    """
    ends = _pack(tuple(lengths), query.device).ends
    longest = max(lengths)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        output,
        log_sums,
        ends,
        ends,
        longest,
        longest,
        0.0,
        True,
        no_dropout,
        torch.empty(0, device=query.device),
        scale=scale,
        window_size_left=-1,
        window_size_right=0,
    )
    return grad_query, grad_key, grad_value


class _Pack(NamedTuple):
    """What describes the rows of a pack on the device. `pages`: their number."""

    counts: torch.Tensor
    ends: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    pages: int


@lru_cache(maxsize=4)  # all layers of a forward have the same rows
def _pack(lengths: tuple[int, ...], device: torch.device) -> _Pack:
    counts = torch.tensor(lengths, dtype=torch.int32)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    table, slots = pages(counts)
    number = int(table.max()) + 1
    counts, ends, table, slots = (upload(tensor, device) for tensor in (counts, ends, table, slots))
    return _Pack(counts, ends, table, slots, number)


def pages(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages of each row, int32 [rows, most pages], and the slot of each token, int64 [T].

    `counts`: int32 [rows], tokens of each row. Pages are numbered from 0 in the order of the rows. Entries after a
    row's last page are 0.
    """
    numbers = (counts.long() + PAGE - 1) // PAGE
    starts = numbers.cumsum(0) - numbers
    columns = torch.arange(int(numbers.max()))
    table = torch.where(columns < numbers[:, None], starts[:, None] + columns, 0).to(torch.int32)
    slots = torch.cat(
        [
            start * PAGE + torch.arange(n)
            for start, n in zip(starts.tolist(), counts.tolist(), strict=True)
        ]
    )
    return table, slots


def into_pages(tensor: torch.Tensor, slots: torch.Tensor, number: int) -> torch.Tensor:
    """Copy tensor [T, Hkv, D] into `number` pages [number, PAGE, Hkv, D]. The rest of the pages is 0."""
    cache_of_rows = tensor.new_zeros(number * PAGE, *tensor.shape[1:])
    cache_of_rows[slots] = tensor
    return cache_of_rows.view(number, PAGE, *tensor.shape[1:])
