"""The tensors of one training step, made from a rollout.

B: responses. T: tokens of the longest prompt plus response. R: tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qarl.rollout.engine import RolloutBatch
from qarl.rollout.response_fingerprint import refuse_changed

Rows = slice | torch.Tensor
"""Rows of a batch: a slice, or their numbers as int64 [rows]."""


@dataclass
class Batch:
    """Tensors of all responses of one training step:

    input_ids                    int64 [B, T]; prompt, then response, then padding
    prompt_lengths               int64 [B]
    responses                    int64 [B, R]
    response_mask                bool [B, R]
    rollout_log_probs            FP32 [B, R]
    rewards, advantages          FP32 [B]
    rollout_top_tokens           int64 [B, R] or None; the engine's likeliest token at each position
    kept                         uint8 [B, R, packed_width(V)] or None; packed masks of the tokens that top-k and
                                 top-p kept in the pass for the old log-probs (`qarl.kernels.logprob`)
    outside                      bool [B, R] or None; True if the token is not one of those that the trainer's top-k
                                 and top-p kept
    routed_experts               int16 [B, T, layers, k] or None; the experts of each token in the rollout, -1 if
                                 unknown (only in a mixture of experts)
    weights                      FP32 [B, R] or None; the weights of `rollout_correction.rollout_is`
    other_experts                bool [B, T] or None; True if, in the pass for the old log-probs, the trainer's own
                                 routers chose different experts for the token than the rollout
    finish_reasons               why each response ended, in vLLM's words, or None
    """

    input_ids: torch.Tensor
    prompt_lengths: torch.Tensor
    responses: torch.Tensor
    response_mask: torch.Tensor
    rollout_log_probs: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor
    weight_version: int
    rollout_top_tokens: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    outside: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    other_experts: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    finish_reasons: list[str | None] | None = None

    def to(self, device: torch.device) -> Batch:
        """Return the same batch with every tensor on `device`."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [B]: tokens of prompt and response of each row."""
        return self.prompt_lengths + self.response_mask.sum(1)

    def keep(self, rows: Rows, kept: torch.Tensor, outside: torch.Tensor) -> None:
        """Set the fields `kept` and `outside` at the response tokens of `rows`. The arguments have a row per token."""
        if self.kept is None or self.outside is None:
            self.kept = kept.new_zeros(*self.responses.shape, kept.shape[1])
            self.outside = outside.new_zeros(self.responses.shape)
        mask = self.response_mask[rows]
        for stored, found in ((self.kept, kept), (self.outside, outside)):
            padded = stored[rows].clone()
            padded[mask] = found
            stored[rows] = padded

    def note_routing(self, rows: Rows, differing: torch.Tensor) -> None:
        """Store `differing`, bool [rows, T]: True if the trainer's routers chose other experts than the rollout."""
        if self.other_experts is None:
            self.other_experts = torch.zeros_like(self.input_ids, dtype=torch.bool)
        self.other_experts[rows] = differing

    def micro_batches(self, size: int, *, start: int = 0, stop: int | None = None) -> list[slice]:
        """Return slices of at most `size` rows that together cover the rows from `start` to `stop`."""
        stop = len(self) if stop is None else stop
        return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def make_batch(rollout: RolloutBatch, rewards: torch.Tensor, advantages: torch.Tensor, *, pad_token_id: int) -> Batch:
    """Return the batch of a rollout. Its tensors are padded on the right; a forward packs their rows
    (`qarl.trainer.packing`). Raise UserError if a response was changed after it was sampled."""
    if rollout.sampled is not None:
        refuse_changed(rollout.prompt_token_ids, rollout.response_token_ids, rollout.rollout_log_probs, rollout.sampled)
    sequences = [
        prompt + response for prompt, response in zip(rollout.prompt_token_ids, rollout.response_token_ids, strict=True)
    ]
    total = max(map(len, sequences))
    response_lengths = torch.tensor([len(response) for response in rollout.response_token_ids])
    width = max(1, int(response_lengths.max()))
    mask = torch.arange(width)[None, :] < response_lengths[:, None]
    top, routed = rollout.top_token_ids, rollout.routed_experts
    return Batch(
        input_ids=_pad(sequences, total, pad_token_id, torch.int64),
        prompt_lengths=torch.tensor([len(prompt) for prompt in rollout.prompt_token_ids]),
        responses=_pad(rollout.response_token_ids, width, pad_token_id, torch.int64),
        response_mask=mask,
        rollout_log_probs=_pad(rollout.rollout_log_probs, width, 0.0, torch.float32),
        rewards=rewards,
        advantages=advantages,
        weight_version=rollout.weight_version,
        rollout_top_tokens=None if top is None else _pad(top, width, pad_token_id, torch.int64),
        routed_experts=None if routed is None else _pad(routed, total, -1, torch.int16),
        finish_reasons=list(rollout.finish_reasons),
    )


def _pad(rows: Sequence[Sequence[float] | torch.Tensor], width: int, value: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers or tensors [tokens, ...] of all responses as one [B, width, ...], filled up with `value`."""
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    padded = torch.full((len(rows), width, *tensors[0].shape[1:]), value, dtype=dtype)
    for i, row in enumerate(tensors):
        padded[i, : len(row)] = row
    return padded
