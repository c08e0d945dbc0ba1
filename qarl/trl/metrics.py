"""The mismatch and the loss's statistics in TRL's logs, and the mismatch guard.

TRL averages each metric over the micro-batches between two logs. An average is wrong for maxima and shares. So QaRL
collects the statistics of all micro-batches and processes, and combines them once per log. The guard is that of the
local backend (`qarl.metrics.mismatch_limit`), with both of its limits.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor

from qarl.config import Config
from qarl.metrics.step_metrics import token_mismatch
from qarl.rollout.publish.manifest import PublishReport
from qarl.step.limit import StepLimit
from qarl.step.noise import RESPONSES, compare_with_noise, has_noise_limit
from qarl.step.statistics import Counts, LogProbPairs, ObjectiveStatistics
from qarl.trainer.policy import Policy
from qarl.trl.config import in_trls_words, trls_words
from qarl.trl.log_probs import as_batch
from qarl.turns.conversation import Span


class StepMetrics:
    """Collects the measurements of `QaRLTrainer` between two logs."""

    def __init__(self, config: Config, policy: Policy, accelerator: Any) -> None:
        self.config = config
        self.policy = policy
        self.accelerator = accelerator
        self._statistics = ObjectiveStatistics()
        self._pairs = LogProbPairs()
        self._limit = StepLimit(config.quant.mismatch_limit, policy.limit_level)
        self._noise_is_checked = not has_noise_limit(
            policy.limit_level, config.quant.mismatch_limit
        )

    @torch.no_grad()
    def check_noise_once(
        self,
        called: Any,
        inputs: dict[str, Any],
        mask: Tensor,
        turns: Sequence[Sequence[Span]] | None,
    ) -> None:
        """In the first call, compare |δ| with the model's rounding noise, as the local backend's probe does.

        `called`: the model or DDP's wrapper around it. `inputs`: TRL's first micro-batch, of which each process
        compares some responses. `mask`, `turns`: of the model's tokens, and as of `as_batch`.

        Raises:
            MismatchError: over all processes, |δ| is more than rounding explains.
        """
        if self._noise_is_checked:
            return
        mask = mask[:RESPONSES]
        (tokens,) = self._summed([int(mask.sum())])
        if not tokens:
            return  # all responses were masked, as TRL does with truncated ones; the next micro-batch may have tokens
        self._noise_is_checked = True
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)[:RESPONSES]
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)[
            :RESPONSES
        ]
        rollout = inputs["sampling_per_token_logps"][:RESPONSES]
        batch = as_batch(ids, attention_mask, rollout.shape[1], turns and turns[:RESPONSES])
        batch.rollout_log_probs = rollout.float()
        self.policy.called = called
        noise = compare_with_noise(
            self.policy.in_comparison(),
            lambda: self.policy.batch_log_probs(batch, self.config),
            batch.rollout_log_probs,
            mask.bool(),
        )
        in_trls_words(noise.over_ranks(self._summed).check)

    def add(self, statistics: dict[str, float], *, first: bool) -> None:
        """Add the statistics of a micro-batch. `first`: whether it is of the first optimizer step after its rollout,
        in which every ratio is 1."""
        self._statistics.add(statistics, first=first)

    def compare(self, old: Tensor, rollout: Tensor, mask: Tensor, *, trained: bool) -> None:
        """Compare the log-probs of trainer and engine, all [B, T]. `trained`: whether an update has been made.

        Raises:
            MismatchError: before the first update, the mismatch over all processes' micro-batches exceeds its limit.
        """
        self._pairs.add(old.detach().cpu(), rollout, mask)
        if trained:
            return
        counts = Counts.of(mask, old, rollout).over_ranks(self._summed)
        self._check(counts.mismatch, counts.response_length, before_first_update=True)

    def _summed(self, numbers: Sequence[float]) -> list[float]:
        """Return each number's sum over all processes."""
        accelerator = self.accelerator
        own = torch.tensor(list(numbers), dtype=torch.float64, device=accelerator.device)
        sums = accelerator.reduce(own, reduction="sum")
        return cast(list[float], sums.tolist())

    def take(self, report: PublishReport | None) -> dict[str, float]:
        """Return the metrics of all processes since the last call."""
        pairs = LogProbPairs(self._of_all(self._pairs.parts))
        statistics = ObjectiveStatistics(self._of_all(self._statistics.parts))
        self._pairs = LogProbPairs()
        self._statistics = ObjectiveStatistics()
        metrics = statistics.metrics()
        mismatch = token_mismatch(*pairs.joined()) if pairs.parts else {}
        if mismatch:
            warning = self._check(
                mismatch["mismatch/abs_mean"], pairs.mean_length, before_first_update=False
            )
            metrics |= mismatch | {"mismatch/over_limit": float(warning is not None)}
            if warning and self.accelerator.is_main_process:
                warnings.warn(warning, stacklevel=2)
        if report is not None:
            metrics["publish/mbytes"] = report.bytes / 1e6
            metrics |= {f"publish/{phase}_s": seconds for phase, seconds in report.seconds.items()}
        return metrics

    def _of_all(self, own: list[Any]) -> list[Any]:
        """Return the entries of all processes, if this one has any."""
        return list(gather_object(own)) if own else []

    def _check(self, abs_mean: float, length: float, *, before_first_update: bool) -> str | None:
        warning: str | None = in_trls_words(
            lambda: self._limit.check(
                abs_mean,
                response_length=length,
                temperature=self.config.rollout.temperature,
                before_first_update=before_first_update,
            )
        )
        return warning and trls_words(warning)
