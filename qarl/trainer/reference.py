"""The KL term of the local backend: a frozen copy of the policy, and its log-probs of a batch.

The reference is the policy as it was before the first step: the weights in `model.path`, quantized and aligned like the
policy's. So the KL is exactly 0 before the first update, and the engine's kernels cause none. verl's reference policy
is not quantized, so verl's KL also contains the effect of quantization. The copy costs the memory of the model's
weights and low-bit tensors, without gradients and optimizer states, and a step costs one more forward over the batch.
"""

from __future__ import annotations

import torch

from qarl.config import Config
from qarl.objectives import library
from qarl.objectives.settings import Settings
from qarl.trainer.batch import Batch, Rows
from qarl.trainer.packing import micro_batches
from qarl.trainer.policy import Policy


class Reference:
    """The reference policy. `log_probs`: those of the batch of this step, FP32 [B, R]."""

    def __init__(self, config: Config, settings: Settings) -> None:
        self.config, self.settings = config, settings
        self.policy = Policy.load(config)
        self.policy.model.requires_grad_(False).eval()
        self.log_probs: torch.Tensor | None = None

    @torch.no_grad()
    def begin(self, batch: Batch) -> None:
        """Compute the log-probs of a step. Call this after the old log-probs, because both use the same kept tokens."""
        other_experts = batch.other_experts  # a forward would replace what the policy's own routers chose
        self.log_probs = torch.zeros_like(batch.rollout_log_probs)
        for rows in micro_batches(batch, self.config.actor, log_probs=True):
            self.log_probs[rows] = self.policy.response_log_probs(
                batch, rows, temperature=self.config.rollout.temperature
            )
        batch.other_experts = other_experts

    def term(
        self, batch: Batch, rows: Rows, log_prob: torch.Tensor, *, responses: int, tokens: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the KL term of one micro-batch with its factor, and its statistic. `log_prob`: [rows, R].

        `responses`, `tokens`: their number in the whole mini-batch."""
        assert self.log_probs is not None  # `begin` comes first
        found = library.kl_term(
            log_prob,
            self.log_probs[rows],
            batch.response_mask[rows],
            self.settings,
            responses=responses,
            tokens=tokens,
        )
        return self.settings.kl_loss_coef * found, {"sum/kl_loss": found.item()}
