"""PyTorch functions with the rounding that qarl/kernels/cuda/layer_ops.py ascribes to vLLM's operators, for tests."""

from __future__ import annotations

import torch

from qarl.kernels.cuda import layer_ops

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
        ATTENTION: layer_ops.flash_reference(query, key, value, scale),
        **{f"the same, tiles of {n}": layer_ops.flash_reference(query, key, value, scale, tile=n) for n in (64, 176)},
        "weights divided, then rounded": whole(scores, rounded=True),
        "weights in FP32": whole(scores, rounded=False),
        "scores rounded": whole(scores.bfloat16().float(), rounded=False),
    }


def differing_shares(found: torch.Tensor, candidates: dict[str, torch.Tensor]) -> dict[str, float]:
    """Candidate -> share of the outputs that differ from `found`."""
    return {name: float((found.cpu() != ours).float().mean()) for name, ours in candidates.items()}


def vllm_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] by vLLM's method of a head that is not quantized. hidden is [T, K], weight is [V, K]."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    layer, method = torch.nn.Module(), UnquantizedEmbeddingMethod()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    method.process_weights_after_loading(layer)
    logits: torch.Tensor = method.apply(layer, hidden)
    return logits


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return norm and sum as vLLM's `fused_add_rms_norm` does. All tensors are BF16; x and residual are [..., K]."""
    total = x + residual
    return layer_ops.rms_norm_reference(total, weight, epsilon), total


def rotary_reference(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate x BF16 [T, heads, D] by cosines and sines BF16 [T, D / 2], as vLLM's `rotary_embedding` does."""
    first, second = x.float().chunk(2, dim=-1)
    cosines, sines = cosines.float()[:, None], sines.float()[:, None]
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(x.dtype)


def log_softmax_reference(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
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
