"""The formulas of a step in float64: advantages, learning rates, clipping, AdamW and Muon.

Sources: arXiv 2402.03300 (GRPO), 2402.14740 (RLOO), 2503.20783 (Dr. GRPO), 2501.03262 (REINFORCE++), 1711.05101 (AdamW,
algorithm 2) and Keller Jordan's page on Muon (https://kellerjordan.github.io/posts/muon/), whose package has the five
Newton-Schulz steps in BF16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from muon import zeropower_via_newtonschulz5
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic on Keller Jordan's page."""


def twin_advantages(config: Any, rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """One advantage per response. The reward of an empty response counts in the baseline of its group, as in verl."""
    estimator, size = config.algorithm.adv_estimator, config.rollout.n
    if config.actor.loss == "reinforce":
        return _whitened(rewards, lengths)
    advantages = []
    for start in range(0, len(rewards), size):
        group = [float(reward) for reward in rewards[start : start + size]]
        mean = sum(group) / size
        if len(set(group)) == 1:
            advantages += [0.0] * size
            continue
        variance = sum((reward - mean) ** 2 for reward in group) / (size - 1)
        for reward in group:
            others = (sum(group) - reward) / (size - 1)
            centred = reward - mean
            if estimator == "rloo":
                advantages.append(reward - others)
            elif estimator == "grpo" and config.algorithm.norm_adv_by_std_in_grpo:
                advantages.append(centred / (math.sqrt(variance) + 1e-6))
            else:
                advantages.append(centred)
    return advantages


def _whitened(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Rewards less their mean over tokens, divided by their standard deviation over tokens."""
    tokens = [
        reward for reward, length in zip(rewards, lengths, strict=True) for _ in range(length)
    ]
    mean = sum(tokens) / len(tokens)
    variance = sum((reward - mean) ** 2 for reward in tokens) / (len(tokens) - 1)
    return [(reward - mean) / math.sqrt(variance + 1e-8) for reward in rewards]


def rate_factor(optim: Any, training_step: int, total: int) -> float:
    """Linear warm-up from 0, then constant or half a cosine down to `min_lr_ratio` at the last step."""
    if training_step < optim.lr_warmup_steps:
        return training_step / optim.lr_warmup_steps
    if optim.lr_scheduler_type == "constant":
        return 1.0
    share = (training_step - optim.lr_warmup_steps) / (total - optim.lr_warmup_steps)
    height = (1 + math.cos(math.pi * min(1.0, share))) / 2
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * height


def total_norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Muon's five Newton-Schulz steps in float64, of a matrix divided by its norm."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.double()
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if x.shape[-2] <= x.shape[-1] else wide.mT


class TwinOptimizer:
    """AdamW, and Muon for the matrices of the decoder blocks. Its state is its own; gradients are given.

    `rounding`: of the last change, float64: how far it is from that of the package's Newton-Schulz steps in BF16. It is
    0 for AdamW, whose rule is FP32."""

    def __init__(self, optim: Any) -> None:
        self.optim = optim
        self.state: dict[str, dict[str, Any]] = {}

    def has_muon(self, name: str, weight: Tensor) -> bool:
        """Whether Muon updates this parameter: matrices, and not embeddings and the head."""
        outside = "embed_tokens" in name or "lm_head" in name
        return self.optim.name == "muon" and weight.ndim >= 2 and not outside

    def change(self, name: str, weight: Tensor, gradient: Tensor, factor: float) -> Tensor:
        """The change of a weight, float64. `gradient`: after clipping. `factor`: of the peak learning rates."""
        state = self.state.setdefault(name, {"step": 0, "first": 0.0, "second": 0.0})
        state["step"] += 1
        gradient, weight = gradient.double(), weight.double()
        if self.has_muon(name, weight):
            beta, rate = self.optim.muon_momentum, self.optim.muon_lr * factor
            state["first"] = beta * state["first"] + (1 - beta) * gradient
            ahead = (1 - beta) * gradient + beta * state["first"]
            rows, columns = weight.shape[-2:]
            shape = math.sqrt(max(1.0, rows / columns))
            update = orthogonalized(ahead) * shape
            rounded = zeropower_via_newtonschulz5(ahead, steps=5).double() * shape
            self.rounding = rate * (rounded - update)
            return -rate * (update + self.optim.weight_decay * weight)
        self.rounding = torch.zeros((), dtype=torch.float64)
        rate = self.optim.lr * factor
        beta1, beta2 = self.optim.betas
        state["first"] = beta1 * state["first"] + (1 - beta1) * gradient
        state["second"] = beta2 * state["second"] + (1 - beta2) * gradient.square()
        first = state["first"] / (1 - beta1 ** state["step"])
        second = state["second"] / (1 - beta2 ** state["step"])
        return -rate * (first / (second.sqrt() + self.optim.eps) + self.optim.weight_decay * weight)


class TwinScale:
    """The factor of the loss in FP16: 2**16 at first, half of it after an overflow, doubled after 100 updates."""

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self.scale = 2.0**16 if active else 1.0
        self.good, self.overflows = 0, 0

    def check(self, update: Any, norm: float) -> None:
        assert update.scale == self.scale
        if not self.active:
            return
        if math.isfinite(norm):
            self.good += 1
            if self.good == 100:
                self.scale, self.good = 2 * self.scale, 0
        else:
            self.overflows += 1
            self.scale, self.good = self.scale / 2, 0

    def metrics(self) -> dict[str, float]:
        if not self.active:
            return {}
        return {"actor/loss_scale": self.scale, "actor/overflows": self.overflows}


def difference(change: Tensor, before: Tensor, after: Tensor) -> float:
    """The error of `after`, as a share of the change, less what FP32 rounds: the weight after its decay, and again
    after the update."""
    error = (after.double() - before.double() - change).norm()
    rounded = 2 * before.double().norm() * 2**-24
    return float((error - rounded).clamp(min=0) / change.norm().clamp(min=1e-30))
