"""Metrics of every step: how far the trainer's log-probs are from the rollout's, scores, lengths, seconds per phase.

Pure functions of tensors. Definitions are verl's if verl has one (`verl/trainer/ppo/rollout_corr_helper.py`,
`metric_utils.py`, `utils/debug/metrics.py`), under the prefix `mismatch/` instead of `rollout_corr/`. Two differences:

- Log-probs are subtracted in FP32, as the loss does, but the statistics are taken in FP64: in FP32, exp(δ) - δ - 1
  loses all digits below δ = 3e-4, and an aligned trainer lives below that.
- A response without tokens is left out of per-response means (verl counts its ratio as 1).

Quantiles, maximum and effective sample size stand beside the KL estimates because means can hide what matters: in arXiv
2605.14220 the mean of |δ| is small while its maximum nears 1, and the KL of the PPO ratio stays flat over the 700 steps
in which a run begins to decay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

# verl's bound on log-ratios before exp, and its default truncation of token weights.
SAFETY_BOUND = 20.0
ROLLOUT_IS_THRESHOLD = 2.0

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


def mismatch_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """Compare the two policies on the sampled tokens; δ = old_log_prob - rollout_log_prob, in nats a token.

    - `mismatch/abs_mean`, `abs_max`, `abs_p50`, `abs_p90`, `abs_p99`, `abs_p999`: of |δ| over tokens
    - `mismatch/k1` = mean(-δ) and `mismatch/k3` = mean(exp(δ) - δ - 1): estimates of KL(rollout‖trainer), verl's `kl`
      and `k3_kl`
    - `mismatch/ess`: effective sample size over the number of tokens, in (0, 1], of the token weights exp(δ) truncated
      at 2: verl's `rollout_is_eff_sample_size`
    - `mismatch/ppl_ratio`: mean over responses of the trainer's perplexity over the rollout's
    - `mismatch/pearson`: correlation of the two probabilities over tokens, verl's `rollout_actor_probs_pearson_corr`;
      NaN if either is constant

    All three arguments are [batch, response_length]; the mask is bool or 0/1. Positions outside the mask may hold
    anything. Raises ValueError for unequal shapes and for an empty mask.
    """
    mask = _checked_mask(response_mask, old_log_prob, rollout_log_prob)
    old, rollout = old_log_prob.detach().float(), rollout_log_prob.detach().float()
    # Zeros outside the mask: a NaN there times zero would be a NaN.
    all_deltas = (old - rollout).double().masked_fill(~mask, 0.0)
    delta = all_deltas[mask]
    magnitude = delta.abs()
    quantiles = np.quantile(magnitude.cpu().numpy(), list(_QUANTILES.values()))
    weights = delta.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp().clamp(max=ROLLOUT_IS_THRESHOLD)
    lengths = mask.sum(-1)
    mean_delta = (all_deltas.sum(-1) / lengths)[lengths > 0]
    probs = torch.stack([old[mask].double().exp(), rollout[mask].double().exp()])
    values = {
        "abs_mean": magnitude.mean(),
        "abs_max": magnitude.max(),
        **{f"abs_{label}": value for label, value in zip(_QUANTILES, quantiles, strict=True)},
        "k1": -delta.mean(),
        "k3": (delta.expm1() - delta).mean(),
        "ess": weights.mean().square() / weights.square().mean(),
        "ppl_ratio": (-mean_delta).exp().mean(),
        "pearson": _pearson(probs[0], probs[1]),
    }
    return {f"mismatch/{name}": float(value) for name, value in values.items()}


def _checked_mask(response_mask: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The mask as bool; ValueError unless all shapes are equal and at least one token counts."""
    shapes = [tuple(tensor.shape) for tensor in (response_mask, *others)]
    if len(set(shapes)) != 1:
        raise ValueError(f"response_mask and the tensors it masks differ in shape: {shapes}")
    mask = response_mask.bool()
    if not mask.any():
        raise ValueError("response_mask selects no token")
    return mask


def _pearson(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()


def response_metrics(
    scores: Sequence[float] | torch.Tensor,
    response_lengths: Sequence[int] | torch.Tensor,
    max_response_length: int,
    *,
    prompt_lengths: Sequence[int] | torch.Tensor | None = None,
    finish_reasons: Sequence[str | None] | None = None,
) -> dict[str, float]:
    """Scores and lengths of one batch of responses, under verl's names; lengths in tokens.

    Empty (aborted) responses are left out of `critic/score/*`, as in verl; `critic/score/std` (population) is ours.
    `response_length/clip_ratio` is the fraction that ran into `max_response_length`: from `finish_reasons` ("length")
    if given, because a response may end on its last allowed token; otherwise, as verl, from the length alone.
    """
    length = np.asarray(response_lengths, dtype=np.float64)
    score = np.asarray(scores, dtype=np.float64)
    if score.shape != length.shape or length.ndim != 1 or length.size == 0:
        raise ValueError(f"need as many scores as response lengths, and one at least: {score.shape}, {length.shape}")
    present = score[length > 0]
    clipped = length == max_response_length
    if finish_reasons is not None:
        clipped = np.asarray([reason == "length" for reason in finish_reasons])
    metrics = {
        **_mean_max_min("critic/score", present),
        "critic/score/std": float(present.std()) if present.size else float("nan"),
        **_mean_max_min("response_length", length),
        "response_length/clip_ratio": float(clipped.mean()),
        "response/aborted_ratio": float((length == 0).mean()),
    }
    if prompt_lengths is not None:
        metrics |= _mean_max_min("prompt_length", np.asarray(prompt_lengths, dtype=np.float64))
    return metrics


def _mean_max_min(name: str, values: np.ndarray) -> dict[str, float]:
    if not values.size:
        return dict.fromkeys((f"{name}/mean", f"{name}/max", f"{name}/min"), float("nan"))
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


class PhaseTimer:
    """Wall-clock seconds of one training step by phase.

    `with timer.phase("rollout"): ...` adds to that phase, also when the block raises; `pop()` reads and resets.
    On an accelerator pass its `synchronize` (torch.cuda.synchronize): kernels run after the Python that queued them,
    and would be counted to the next phase.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize or (lambda: None)
        self._seconds: dict[str, float] = {}
        self._depth = 0
        self._step = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._synchronize()
        self._depth += 1
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            seconds = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._depth -= 1
            if not self._depth and name != "eval":
                self._step += seconds

    def pop(self) -> dict[str, float]:
        """Seconds since the last `pop()`: `timing_s/<phase>` and `timing_s/step`, their sum.

        As in verl the step leaves evaluation out; a phase within another counts once.
        """
        seconds = {**self._seconds, "step": self._step}
        self._seconds, self._step = {}, 0.0
        return {f"timing_s/{name}": value for name, value in seconds.items()}
