"""The mismatch and the loss's statistics in TRL's logs, and the mismatch guard.

TRL averages each metric over the micro-batches between two logs. An average is wrong for maxima and shares. So QaRL
collects the statistics of all micro-batches and processes, and combines them once per log. The guard is that of the
local backend (`qarl.metrics.mismatch_limit`), with both of its limits.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from accelerate.utils import gather_object

from qarl.config import Config
from qarl.metrics.mismatch_limit import NOISE_LIMITS, check_mismatch, check_noise, times_noise
from qarl.metrics.step_metrics import token_mismatch
from qarl.objectives.metrics import after_first_metrics, reduce_metrics
from qarl.rollout.publish.manifest import PublishReport
from qarl.trainer.mismatch_watch import PROBE_RESPONSES, compare_with_noise
from qarl.trainer.policy import Policy
from qarl.trl.config import in_trls_words, trls_words
from qarl.trl.log_probs import as_batch


class StepMetrics:
    """Collects the measurements of `QaRLTrainer` between two logs."""

    def __init__(self, config: Config, policy: Policy, accelerator: Any) -> None:
        self.config = config
        self.policy = policy
        self.accelerator = accelerator
        self._statistics: list[tuple[dict[str, float], bool]] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._noise_is_checked = (
            config.quant.mismatch_limit is not None or policy.limit_level not in NOISE_LIMITS
        )

    @torch.no_grad()
    def check_noise_once(self, called: Any, inputs: dict[str, Any]) -> None:
        """In the first call, compare |δ| with the model's rounding noise, as the local backend's probe does.

        `called`: the model or DDP's wrapper around it. `inputs`: TRL's first micro-batch, of which each process
        compares some responses.

        Raises:
            MismatchError: over all processes, |δ| is more than rounding explains.
        """
        if self._noise_is_checked:
            return
        (tokens,) = self._summed(int(inputs["completion_mask"][:PROBE_RESPONSES].sum()))
        if not tokens:
            return  # all responses were masked, as TRL does with truncated ones; the next micro-batch may have tokens
        self._noise_is_checked = True
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)[:PROBE_RESPONSES]
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)[
            :PROBE_RESPONSES
        ]
        rollout = inputs["sampling_per_token_logps"][:PROBE_RESPONSES]
        batch = as_batch(ids, attention_mask, rollout.shape[1])
        batch.rollout_log_probs = rollout.float()
        self.policy.called = called
        level, roots = compare_with_noise(self.policy, self.config, batch)
        delta, noise, tokens = self._summed(roots.delta, roots.noise, roots.tokens)
        in_trls_words(
            lambda: check_noise(times_noise(delta, noise, tokens), level=level, tokens=tokens)
        )

    def add(self, statistics: dict[str, float], *, first: bool) -> None:
        """Add the statistics of a micro-batch. `first`: whether it is of the first optimizer step after its rollout,
        in which every ratio is 1."""
        self._statistics.append((statistics, first))

    def compare(
        self, old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, *, trained: bool
    ) -> None:
        """Compare the log-probs of trainer and engine, all [B, T]. `trained`: whether an update has been made.

        Raises:
            MismatchError: before the first update, the mismatch over all processes' micro-batches exceeds its limit.
        """
        mask = mask.bool().cpu()
        old = old.detach().float().cpu()[mask]
        rollout = rollout.float().cpu()[mask]
        self._pairs.append((old, rollout, mask.sum(1)))
        if trained:
            return
        delta = (old - rollout).abs().double()
        total, tokens, rows = self._summed(float(delta.sum()), delta.numel(), len(mask))
        self._check(total / max(tokens, 1), tokens / max(rows, 1), before_first_update=True)

    def _summed(self, *numbers: float) -> list[float]:
        """Return each number's sum over all processes."""
        sums = torch.tensor(numbers, dtype=torch.float64, device=self.accelerator.device)
        return cast(list[float], self.accelerator.reduce(sums, reduction="sum").tolist())

    def take(self, report: PublishReport | None) -> dict[str, float]:
        """Return the metrics of all processes since the last call."""
        pairs = gather_object(self._pairs) if self._pairs else []
        statistics = gather_object(self._statistics) if self._statistics else []
        self._pairs = []
        self._statistics = []
        later = [part for part, first in statistics if not first]
        metrics = reduce_metrics([part for part, _ in statistics]) | after_first_metrics(later)
        mismatch: dict[str, float] = {}
        if pairs:
            old, rollout, lengths = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            mismatch = token_mismatch(old, rollout, lengths)
        if mismatch:
            mean_length = float(lengths[lengths > 0].double().mean())
            warning = self._check(
                mismatch["mismatch/abs_mean"], mean_length, before_first_update=False
            )
            metrics |= mismatch | {"mismatch/over_limit": float(warning is not None)}
            if warning and self.accelerator.is_main_process:
                warnings.warn(warning, stacklevel=2)
        if report is not None:
            metrics["publish/mbytes"] = report.bytes / 1e6
            metrics |= {f"publish/{phase}_s": seconds for phase, seconds in report.seconds.items()}
        return metrics

    def _check(self, abs_mean: float, length: float, *, before_first_update: bool) -> str | None:
        warning: str | None = in_trls_words(
            lambda: check_mismatch(
                abs_mean,
                limit=self.config.quant.mismatch_limit,
                level=self.policy.limit_level,
                before_first_update=before_first_update,
                response_length=length,
                temperature=self.config.rollout.temperature,
            )
        )
        return warning and trls_words(warning)
