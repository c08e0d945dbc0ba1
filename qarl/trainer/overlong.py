"""What a long response costs: the soft overlong punishment and the overlong filtering of DAPO (arXiv 2503.14476).

A response that the limit cuts off gets the reward of a wrong one, although its reasoning may have been right. Either
the reward falls over the last tokens before the limit (`reward.overlong_buffer_len`), so that the model learns to be
shorter, or such a response is left out of the loss (`actor.mask_truncated_responses`).

The punishment is equation 13 of the paper up to a factor, as verl's reward manager `dapo` computes it: 0 up to
limit - buffer, then falling to -factor at the limit. An evaluation has neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qarl.rollout.requests import RolloutBatch
from qarl.trainer.batch import Batch


def overlong_penalties(
    lengths: Sequence[int], *, limit: int, buffer: int, factor: float
) -> torch.Tensor:
    """Return what is added to each reward, FP32 [responses], 0 or negative. Lengths, `limit` and `buffer` in tokens."""
    excess = torch.tensor(lengths, dtype=torch.float64) - (limit - buffer)
    return (-excess / buffer * factor).clamp(max=0.0).float()


def penalty_metrics(penalties: torch.Tensor) -> dict[str, float]:
    """Return the mean punishment of a batch and the share of responses that have one."""
    return {
        "overlong/penalty_mean": float(penalties.double().mean()),
        "overlong/penalty_frac": float((penalties < 0).double().mean()),
    }


def mask_truncated(batch: Batch, responses: RolloutBatch) -> dict[str, float]:
    """Leave the responses that the limit has cut off out of the loss and its means. Return the share of them.

    Their rewards stay in the means of their groups, as in DAPO and TRL (`mask_truncated_completions`)."""
    cut = torch.tensor([reason == "length" for reason in responses.finish_reasons])
    batch.response_mask &= ~cut[:, None]
    return {"overlong/masked_frac": float(cut.double().mean())}
