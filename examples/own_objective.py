"""An objective of your own: CISPO (arXiv 2506.13585), a policy gradient whose clipped ratio is a mere weight.

    qarl train config=quickstart.yaml plugins=[examples/own_objective.py] actor.loss=cispo

This file is all that it takes. `qarl.config.objectives.Objective` documents what may be said of an objective, and
`qarl.objectives.loss.LossInputs` what it is computed from.
"""

from __future__ import annotations

import torch

from qarl.config.objectives import CLIP_KEYS, Objective, register
from qarl.objectives.loss import LossInputs
from qarl.objectives.settings import Settings


def cispo(inputs: LossInputs, settings: Settings) -> tuple[torch.Tensor, dict[str, float]]:
    """Return -mean(clip(r_t) A log_prob) over the tokens of a mini-batch. The clipped ratio has no gradient.

    A part of a mini-batch divides by the tokens of the whole one, so that the parts add up."""
    accepted = inputs.accepted != 0
    new = torch.where(accepted, inputs.log_prob, 0.0).float()
    old = torch.where(accepted, inputs.old_log_prob.detach(), 0.0).float()
    low = 1 - settings.clip_ratio_low
    high = 1 + settings.clip_ratio_high
    weight = (new.detach() - old).exp().clamp(low, high)
    loss = -(weight * inputs.token_advantages * new).sum() / max(inputs.tokens, 1)
    return loss, {}


register(Objective("cispo", function=f"{__name__}:cispo", keys=CLIP_KEYS))
