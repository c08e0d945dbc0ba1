"""The tokens that top-k and top-p leave, as packed masks: those that the engine sampled from.

The rules of the mask are those of vLLM's `apply_top_k_top_p_pytorch` (vllm/v1/sample/ops/topk_topp_sampler.py). Logits
are upcast to FP32 and divided by the temperature. Then:

    top-k    keeps every token whose logit is at least the k-th largest, including all ties
    top-p    sorts these tokens by ascending logit and drops the first ones, up to a summed probability of 1 - top_p.
             The likeliest token always stays

On GPUs, vLLM finds top-p's threshold for 8 rows and more with a Triton kernel that does not sort. Close to the
threshold it keeps other tokens: under Triton's interpreter up to 2e-4 of a row's probability, for top_p >= 0.99.

The mask is computed once, with the old log-probs, and does not change during the update. Computed again after an
optimizer step, it could exclude a sampled token, and its log-prob would be -inf.

`rollout.min_tokens` leaves out the tokens that end a turn, at its first positions. That mask does not depend on logits,
so it is made where it is needed (`packed_without`). vLLM applies it before the temperature, top-k and top-p.

A mask has one bit per entry of the vocabulary: `packed_width(V)` bytes per response token, or 19 KB at V = 152k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Truncation:
    """`top_p` is in (0, 1]. `top_k` of -1 or 0 keeps all tokens, as in vLLM and verl."""

    top_p: float = 1.0
    top_k: int = -1

    @property
    def active(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


def sampling_mask(scaled: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Return bool [T, V]: whether a token can be sampled. `scaled`: logits / temperature, FP32 [T, V]."""
    top_k = truncation.top_k if 0 < truncation.top_k < scaled.shape[1] else None
    if truncation.top_p >= 1:
        if top_k is None:
            return torch.ones_like(scaled, dtype=torch.bool)
        return scaled >= scaled.topk(top_k, dim=1).values[:, -1:]
    ascending, index = scaled.sort(dim=-1, descending=False)
    if top_k is not None:
        ascending = ascending.masked_fill(ascending < ascending[:, -top_k, None], -torch.inf)
    # The engine, too, subtracts an FP32 top_p from 1.
    rest = 1 - torch.tensor(truncation.top_p, dtype=torch.float32, device=scaled.device)
    mask = ascending.softmax(dim=-1).cumsum(dim=-1) > rest
    mask[:, -1] = True
    return torch.empty_like(mask).scatter_(1, index, mask)


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Bool [T, V] -> uint8 [T, packed_width(V)], lowest bit first."""
    padded = F.pad(mask, (0, -mask.shape[1] % 8)).view(len(mask), -1, 8)
    return (padded * _bits(mask.device)).sum(-1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Invert `pack`: return bool [T, vocabulary]."""
    return (packed[:, :, None] & _bits(packed.device)).bool().flatten(1)[:, :vocabulary]


def packed_without(token_ids: Sequence[int], rows: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return masks of all tokens, and in `rows` (bool [T]) of all but `token_ids`: uint8 [T, packed_width(V)]."""
    packed = rows.new_full((len(rows), packed_width(vocabulary)), 255, dtype=torch.uint8)
    for token in token_ids:
        packed[rows, token // 8] &= 255 - (1 << token % 8)
    return packed


def packed_width(vocabulary: int) -> int:
    """Return the number of bytes of one token's packed mask."""
    return -(-vocabulary // 8)


def _bits(device: torch.device) -> torch.Tensor:
    return torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=device)


@torch.no_grad()
def packed_sampling_mask(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    truncation: Truncation,
    *,
    temperature: float,
    among: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed mask of each row of logits [T, V], and bool [T]: whether the sampled token was added to its
    mask.

    It is added if the computed mask lacks it. `among`: packed masks of the tokens that top-k and top-p choose from;
    None for all.
    """
    scaled = logits.float() / temperature
    if among is None:
        mask = sampling_mask(scaled, truncation)
    else:
        allowed = unpack(among, scaled.shape[1])
        mask = sampling_mask(scaled.masked_fill(~allowed, -torch.inf), truncation) & allowed
    outside = ~mask.gather(1, tokens[:, None])[:, 0]
    mask.scatter_(1, tokens[:, None], True)
    return pack(mask), outside
