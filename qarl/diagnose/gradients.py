"""Gradients of many objectives from one forward, and how they differ from the gradient that is right.

An objective acts on the parameters only through the log-probs. So the forward is shared, every objective gives its
gradient by the log-probs, and objectives that give the same one share the backward.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qarl.config import Config
from qarl.objectives.loss import correction_weights, objective_loss
from qarl.objectives.settings import Settings
from qarl.trainer.batch import Batch, micro_batches
from qarl.trainer.policy import Policy


@dataclass(frozen=True)
class Gradients:
    """For n objectives, P trained parameters and rows of up to R tokens:

    by_parameters   FP32 [n, P] on the CPU, in the order of the model's parameters
    by_log_probs    FP32 [n, rows, R]
    """

    by_parameters: torch.Tensor
    by_log_probs: torch.Tensor

    def silent(self, index: int, advantages: torch.Tensor) -> float:
        """Return the share of responses without a gradient, among those with an advantage. `advantages`: [rows]."""
        taught = advantages != 0
        return float((self.by_log_probs[index] == 0).all(1)[taught].double().mean()) if taught.any() else 0.0


def objective_gradients(
    policy: Policy, config: Config, batch: Batch, old: torch.Tensor, objectives: Sequence[Settings], *, start: int = 0
) -> Gradients:
    """Return the gradients of `objectives` at the policy's weights, over the rows from `start` as one mini-batch.

    `old`: the policy's log-probs before the update, FP32 [B, R]."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    mask = batch.response_mask[start:]
    whole = {"responses": int(mask.any(1).sum()), "tokens": int(mask.sum())}
    weight = [
        correction_weights(old, batch.rollout_log_probs, batch.response_mask, settings.correction)
        for settings in objectives
    ]
    total = torch.zeros(len(objectives), sum(p.numel() for p in parameters))
    slopes = torch.zeros(len(objectives), *batch.response_mask.shape)
    for rows in micro_batches(batch, config.actor, start=start):
        log_probs = policy.response_log_probs(batch, rows, temperature=config.rollout.temperature)
        done: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, (settings, weights) in enumerate(zip(objectives, weight, strict=True)):
            leaf = log_probs.detach().requires_grad_()
            loss, _ = objective_loss(
                leaf,
                old[rows],
                batch.rollout_log_probs[rows],
                batch.advantages[rows],
                batch.response_mask[rows],
                settings,
                weight=None if weights is None else weights[rows],
                **whole,
            )
            (slope,) = torch.autograd.grad(loss, leaf)
            slopes[index, rows] = slope.cpu()
            same = [gradient for other, gradient in done if torch.equal(other, slope)]
            gradient = same[0] if same else _backward(log_probs, parameters, slope)
            done.append((slope, gradient))
            total[index] += gradient
        policy.end_replay()
    return Gradients(total, slopes[:, start:])


def _backward(log_probs: torch.Tensor, parameters: Sequence[Any], slope: torch.Tensor) -> torch.Tensor:
    """Return the gradient by the parameters, FP32 [P], for a gradient by the log-probs. The graph is kept."""
    gradients = torch.autograd.grad(log_probs, parameters, grad_outputs=slope, retain_graph=True, allow_unused=True)
    return torch.cat(
        [
            torch.zeros(parameter.numel()) if gradient is None else gradient.detach().float().flatten().cpu()
            for gradient, parameter in zip(gradients, parameters, strict=True)
        ]
    )


@dataclass(frozen=True)
class Closeness:
    """One gradient against the right one: cosine of their angle, norm of the difference and norm, both relative."""

    cosine: float
    error: float
    norm: float


def closeness(gradient: torch.Tensor, truth: torch.Tensor) -> Closeness:
    """Compare two gradients, [P]. `truth` must not be 0."""
    ours, right = gradient.double(), truth.double()
    length, size = float(ours.norm()), float(right.norm())
    cosine = float(ours @ right) / (length * size) if length else 0.0
    return Closeness(cosine, float((ours - right).norm()) / size, length / size)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean and standard deviation (over n - 1) of a value over batches."""
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}
