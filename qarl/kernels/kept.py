"""The tokens that top-k and top-p keep, as the engine picks them, and a mask of them that lasts for an update.

Order, ties and dtypes are those of vLLM's `apply_top_k_top_p_pytorch` (vllm/v1/sample/ops/topk_topp_sampler.py), which
serves its CPU backend: logits in FP32 over the temperature, then

    top-k    every token whose logit is at least the k-th largest: ties at the k-th place all stay
    top-p    of what is left, in ascending order of the logits, those up to a summed probability of 1 - top_p go; ties
             go in the order of the sort, and the last one always stays

The set belongs to the policy that sampled. It is found once, in the pass for the old log-probs, and fixed for the whole
update: found again after an optimizer step it could leave out tokens that were sampled, with a log-prob of -inf.

A mask takes one bit for each entry of the vocabulary and each response token: `packed_width(V)` bytes a token, 19 KB at
V = 152k. Lists of indices would be shorter for most tokens and have no such bound (ties, flat distributions).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Truncation:
    """`top_p` in (0, 1]; `top_k` as vLLM and verl count it: -1 or 0 for all tokens."""

    top_p: float = 1.0
    top_k: int = -1

    @property
    def active(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


def kept_tokens(scaled: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Bool [T, V]: what is sampled from, given the logits over the temperature, FP32 [T, V]."""
    top_k = truncation.top_k if 0 < truncation.top_k < scaled.shape[1] else None
    if truncation.top_p >= 1:
        if top_k is None:
            return torch.ones_like(scaled, dtype=torch.bool)
        return scaled >= scaled.topk(top_k, dim=1).values[:, -1:]
    ascending, index = scaled.sort(dim=-1, descending=False)
    if top_k is not None:
        ascending = ascending.masked_fill(ascending < ascending[:, -top_k, None], -torch.inf)
    # The engine subtracts its FP32 top_p from 1.
    rest = 1 - torch.tensor(truncation.top_p, dtype=torch.float32, device=scaled.device)
    kept = ascending.softmax(dim=-1).cumsum(dim=-1) > rest
    kept[:, -1] = True
    return torch.empty_like(kept).scatter_(1, index, kept)


def pack(kept: torch.Tensor) -> torch.Tensor:
    """Bool [T, V] -> uint8 [T, packed_width(V)], lowest bit first."""
    padded = torch.nn.functional.pad(kept, (0, -kept.shape[1] % 8)).view(len(kept), -1, 8)
    return (padded * _bits(kept.device)).sum(-1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The inverse of `pack`: bool [T, vocabulary]."""
    return (packed[:, :, None] & _bits(packed.device)).bool().flatten(1)[:, :vocabulary]


def packed_width(vocabulary: int) -> int:
    """Bytes of a packed mask for each token."""
    return -(-vocabulary // 8)


def _bits(device: torch.device) -> torch.Tensor:
    return torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=device)


@torch.no_grad()
def find_kept(
    logits: torch.Tensor, tokens: torch.Tensor, truncation: Truncation, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The packed mask of each row of logits [T, V], and bool [T]: the row's token was outside of it.

    Such a token is kept all the same: it was sampled, so the engine's set has it.
    """
    kept = kept_tokens(logits.float() / temperature, truncation)
    outside = ~kept.gather(1, tokens[:, None])[:, 0]
    kept.scatter_(1, tokens[:, None], True)
    return pack(kept), outside
