"""Metrics of every step: scores, lengths, seconds per phase, and the mismatch between trainer and rollout.

A metric that verl also has (`verl/trainer/ppo/rollout_corr_helper.py`, `metric_utils.py`, `utils/debug/metrics.py`) is
defined as in verl, but its prefix is `mismatch/` instead of `rollout_corr/`. There are two differences from verl:

- Statistics are computed in FP64. In FP32, exp(δ) - δ - 1 has no correct digit for the small δ of an aligned trainer
  (below 3e-4). δ itself is computed in FP32, as in the loss.
- Means over responses leave out responses without tokens. verl counts the ratio of such a response as 1.

The metrics include quantiles, the maximum and the effective sample size, because the mean of |δ| can hide problems
(arXiv 2605.14220).
"""

from __future__ import annotations

import math
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
    """Compare the two policies on the sampled tokens, with δ = old_log_prob - rollout_log_prob in nats per token.

    - `mismatch/abs_mean`, `abs_max`, `abs_p50`, `abs_p90`, `abs_p99`, `abs_p999`: statistics of |δ| over tokens
    - `mismatch/k1` = mean(-δ) and `mismatch/k3` = mean(exp(δ) - δ - 1): estimates of KL(rollout‖trainer), called `kl`
      and `k3_kl` in verl
    - `mismatch/ess`: effective sample size of the token weights min(exp(δ), 2), as a fraction of the number of tokens.
      It is called `rollout_is_eff_sample_size` in verl
    - `mismatch/ppl_ratio`: mean over responses of the trainer's perplexity divided by the rollout's
    - `mismatch/pearson`: correlation of the two probabilities over tokens, called `rollout_actor_probs_pearson_corr` in
      verl. It is NaN if one of the two is constant

    All three arguments are [batch, response_length]. The mask is bool or 0/1. Values outside the mask are ignored.
    Raises ValueError for unequal shapes and for an empty mask.
    """
    mask = _checked_mask(response_mask, old_log_prob, rollout_log_prob)
    old, rollout = old_log_prob.detach().float(), rollout_log_prob.detach().float()
    # Set values outside the mask to zero; multiplying by the mask would keep a NaN.
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
    """Return the mask as bool. Raise ValueError unless all shapes are equal and the mask selects at least one token."""
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
    """Return metrics of scores and lengths of one batch of responses, under verl's names. Lengths are in tokens.

    - `critic/score/*` leaves out empty (aborted) responses, as in verl. `critic/score/std` (of the population) is not
      in verl.
    - `response_length/clip_ratio` is the fraction of responses with the finish reason "length". Without
      `finish_reasons` it is the fraction with `max_response_length` tokens, as in verl.
    """
    length = np.asarray(response_lengths, dtype=np.float64)
    score = np.asarray(scores, dtype=np.float64)
    if score.shape != length.shape or length.ndim != 1 or length.size == 0:
        raise ValueError(f"need one score per response, and at least one response: {score.shape}, {length.shape}")
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
    found = {kind: getattr(values, kind)() if values.size else math.nan for kind in ("mean", "max", "min")}
    return {f"{name}/{kind}": float(value) for kind, value in found.items()}


class PhaseTimer:
    """Measure the wall-clock seconds of one training step by phase.

    `with timer.phase("rollout"): ...` adds the seconds of the block to that phase, even if the block raises.

    On a GPU, pass `synchronize=torch.cuda.synchronize`. Otherwise queued kernels would count in the next phase.
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
        """Return the seconds since the last `pop()`: `timing_s/<phase>` for each phase, and their sum `timing_s/step`.

        As in verl, the sum leaves out evaluation. A phase inside another phase counts only once in the sum.
        """
        seconds = {**self._seconds, "step": self._step}
        self._seconds, self._step = {}, 0.0
        return {f"timing_s/{name}": value for name, value in seconds.items()}
