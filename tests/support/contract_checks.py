"""PyTorch functions with the rounding that qarl/kernels/cuda/layer_ops.py ascribes to vLLM's operators, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from qarl.kernels import reference
from qarl.kernels.cuda import layer_ops

TILE = 128
"""Keys after which FlashAttention 3 rescales its sums, for heads of 96 and 128."""
ATTENTION = "weights rounded, then divided"
"""The contract's name among `attention_roundings`."""


def attention_roundings(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> dict[str, torch.Tensor]:
    """Causal attention of one row by each rounding that a kernel might have, BF16 [T, H, D] on the CPU. query is
    [T, H, D], key and value are [T, Hkv, D]."""
    query, key, value = (tensor.cpu() for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    q = query.transpose(0, 1).float()
    k, v = (tensor.transpose(0, 1).repeat_interleave(groups, 0).float() for tensor in (key, value))
    later = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    scores = q @ k.transpose(1, 2)

    def whole(scores: torch.Tensor, *, rounded: bool) -> torch.Tensor:
        weights = (scores * scale).masked_fill(later, -torch.inf).softmax(-1)
        return ((weights.bfloat16().float() if rounded else weights) @ v).bfloat16().transpose(0, 1)

    return {
        ATTENTION: flash_reference(query, key, value, scale),
        **{
            f"the same, tiles of {n}": flash_reference(query, key, value, scale, tile=n)
            for n in (64, 176)
        },
        "weights divided, then rounded": whole(scores, rounded=True),
        "weights in FP32": whole(scores, rounded=False),
        "scores rounded": whole(scores.bfloat16().float(), rounded=False),
    }


def vllm_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] by vLLM's method of a head that is not quantized. hidden is [T, K], weight is [V, K]."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    layer, method = torch.nn.Module(), UnquantizedEmbeddingMethod()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    method.process_weights_after_loading(layer)
    logits: torch.Tensor = method.apply(layer, hidden)
    return logits


def rotary_reference(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate x BF16 [T, heads, D] by cosines and sines BF16 [T, D / 2], as vLLM's `rotary_embedding` does."""
    first, second = x.float().chunk(2, dim=-1)
    cosines, sines = cosines.float()[:, None], sines.float()[:, None]
    return torch.cat(
        (first * cosines - second * sines, second * cosines + first * sines), dim=-1
    ).to(x.dtype)


def log_softmax_reference(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return FP32 log-probs [T] of `tokens` int64 [T] as vLLM's `compute_token_logprobs` does from BF16 logits [T, V].

    vLLM sums 1024 exponentials at a time.
    """
    scaled = logits.float() / temperature
    largest = scaled.amax(-1, keepdim=True)
    total = torch.zeros_like(largest)
    for block in (scaled - largest).exp().split(1024, dim=-1):
        total += block.sum(-1, keepdim=True)
    chosen = scaled.gather(-1, tokens[:, None])
    return (chosen - largest - total.log())[:, 0]


def silu_and_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Do the same as `silu_and_mul`, in PyTorch: both results are rounded."""
    return F.silu(gate.float()).to(gate.dtype) * up


def chosen_experts_reference(
    logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `layer_ops.chosen_experts`, in PyTorch."""
    weights, experts = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k]
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, experts.int()


def flash_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, tile: int = TILE
) -> torch.Tensor:
    """Return causal attention of one row in PyTorch, with FlashAttention 3's rounding: BF16 [t, H, D].

    query is BF16 [t, H, D]; key and value are BF16 [T, Hkv, D]. The last query sees all keys. Keys are visited from the
    last tile to the first. After each tile the sums are rescaled to the largest score so far.
    """
    length, heads, size = query.shape
    groups = heads // key.shape[1]
    q = query.transpose(0, 1).float()
    k, v = (tensor.transpose(0, 1).repeat_interleave(groups, 0).float() for tensor in (key, value))
    last = torch.arange(length)[:, None] + k.shape[1] - length
    largest = torch.full((heads, length, 1), -torch.inf)
    divisor, output = torch.zeros(heads, length, 1), torch.zeros(heads, length, size)
    factor = scale * 1.4426950408889634  # the kernel computes powers of two
    for start in reversed(range(0, k.shape[1], tile)):
        keys = slice(start, min(start + tile, k.shape[1]))
        scores = q @ k[:, keys].transpose(1, 2)
        scores = scores.masked_fill(torch.arange(keys.start, keys.stop) > last, -torch.inf)
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        seen = largest.masked_fill(largest == -torch.inf, 0)  # a query before all keys of this tile
        weights = torch.exp2(scores * factor - seen * factor)
        rescale = torch.exp2((before - seen) * factor)
        divisor = divisor * rescale + weights.sum(-1, keepdim=True)
        output = output * rescale + weights.bfloat16().float() @ v[:, keys]
    return (output / divisor).bfloat16().transpose(0, 1)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    lengths: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `layer_ops.flash_attention`, in PyTorch."""
    rows = list(zip(*(tensor.split(list(lengths)) for tensor in (query, key, value)), strict=True))
    output = torch.cat([flash_reference(q, k, v, scale) for q, k, v in rows])
    log_sums = [_scores(q.float(), k.float(), scale).logsumexp(-1) for q, k, _ in rows]
    return output, torch.cat(log_sums, 1)


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Scaled causal scores of one row, [H, t, t]."""
    length, heads, _ = query.shape
    key = key.repeat_interleave(heads // key.shape[1], 1)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill(later, -torch.inf)


def flash_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    scale: float,
    lengths: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    """Do the same as `layer_ops.flash_attention_backward`, in PyTorch: weights are exp(score - log of the sum), and
    their gradient needs the product of output and gradient, not the forward's weights."""
    operands = [tensor.split(list(lengths)) for tensor in (grad, query, key, value, output)]
    grads = [
        _row_backward(*row, log_sums=sums, scale=scale)
        for *row, sums in zip(*operands, log_sums.split(list(lengths), 1), strict=True)
    ]
    return tuple(torch.cat(parts).bfloat16() for parts in zip(*grads, strict=True))


def _row_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    *,
    log_sums: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    grad, query, key, value, output = (t.float() for t in (grad, query, key, value, output))
    shared = (key.shape[1], query.shape[1] // key.shape[1])
    weights = (_scores(query, key, scale) - log_sums[..., None]).exp()
    wide_key, wide_value = (t.repeat_interleave(shared[1], 1) for t in (key, value))
    of_weights = torch.einsum("qhd,khd->hqk", grad, wide_value)
    mean = (grad * output).sum(-1).t()[..., None]
    of_scores = weights * (of_weights - mean) * scale
    grad_query = torch.einsum("hqk,khd->qhd", of_scores, wide_key)
    grad_key = torch.einsum("hqk,qhd->khd", of_scores, query)
    grad_value = torch.einsum("hqk,qhd->khd", weights, grad)
    by_head = (t.unflatten(1, shared).sum(2) for t in (grad_key, grad_value))
    return grad_query, *by_head


def stand_in_for_vllm(monkeypatch: Any) -> None:
    """Let level `model` of a GPU run on a CPU: PyTorch functions take the place of the engine's operators."""
    monkeypatch.setattr(layer_ops, "rms_norm", reference.rms_norm)
    monkeypatch.setattr(layer_ops, "rms_norm_backward", reference.rms_norm_backward)
    monkeypatch.setattr(layer_ops, "silu_and_mul", silu_and_mul_reference)
    monkeypatch.setattr(layer_ops, "flash_attention", flash_attention)
    monkeypatch.setattr(layer_ops, "flash_attention_backward", flash_attention_backward)
    monkeypatch.setattr(layer_ops, "router_logits", F.linear)
    monkeypatch.setattr(layer_ops, "chosen_experts", chosen_experts_reference)
