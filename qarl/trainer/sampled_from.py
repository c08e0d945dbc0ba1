"""The tokens that the engine chose from at each position of a response, where these are not all: packed masks.

Top-k and top-p depend on the logits, so their masks are computed once and stored (`qarl.kernels.sampling_masks`).
`rollout.min_tokens` leaves out the tokens that end a turn, at its first positions, whatever the logits are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qarl.kernels.log_probs import LogitsInBlocks, WholeLogits
from qarl.kernels.sampling_masks import Truncation, packed_without
from qarl.trainer.batch import Batch, Rows, index_of
from qarl.trainer.layout import Layout


def leave_out_early_ends(batch: Batch, min_tokens: int, ends: Sequence[int]) -> None:
    """Note in `batch` where the engine sampled none of the tokens `ends`: at the first `min_tokens` of each turn."""
    if batch.conversations is None:
        before = torch.arange(batch.responses.shape[1]) < min_tokens
        early = before[None] & batch.response_mask
    else:
        early = torch.zeros_like(batch.response_mask)
        for row, conversation in enumerate(batch.conversations):
            for start, end in conversation.turns:
                early[row, start : min(start + min_tokens, end)] = True
    batch.before_min_tokens = early
    batch.ends = tuple(ends)


def sampled_from(
    batch: Batch,
    rows: Rows,
    layout: Layout,
    logits: WholeLogits | LogitsInBlocks,
    tokens: torch.Tensor,
    truncation: Truncation | None,
    temperature: float,
) -> torch.Tensor | None:
    """Return the packed masks of the tokens that `tokens` of `rows` were chosen from, uint8 [T, packed_width(V)], or
    None for all. `truncation`: store the tokens that it leaves in the batch."""
    index = index_of(rows)
    among = None
    if batch.before_min_tokens is not None:
        early = layout.of_responses(batch.before_min_tokens[index])
        among = packed_without(batch.ends, early, logits.vocabulary)
    if truncation is not None and truncation.active:
        masks = logits.sampling_mask(tokens, truncation, temperature=temperature, among=among)
        batch.set_sampling_mask(rows, *map(layout.to_responses, masks))
    if batch.sampling_mask is None:
        return among
    return layout.of_responses(batch.sampling_mask[index])
