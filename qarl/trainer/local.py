"""The local backend: trainer and vLLM in one process. Read this file to learn the algorithm.

One training step, with one function per stage:

    rollout      sample rollout.n responses a prompt from the engine's low-bit weights
    reward       score them; group-relative advantages
    old_log_prob the trainer's own log-probs, through the same kernels as the update
    update       ppo_mini_batch_size prompts an optimizer step, the TBPO loss
    publish      the tensors the next forward multiplies by go to the engine, under a new version

verl's trainer does the same over Ray and FSDP2. Weights are published once after the last optimizer step of a training
step: nothing is sampled in between.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qarl.checks.sampling import sampling_config, truncation
from qarl.config import Config
from qarl.data import Prompt
from qarl.data.rewards import score_responses
from qarl.metrics.mismatch import PhaseTimer, mismatch_metrics, response_metrics
from qarl.process import keep_freed_memory
from qarl.quant.phases import measure_phases
from qarl.quant.stacks import stacked_experts
from qarl.rollout.engine import EngineFailed, RolloutBatch, RolloutEngine, SamplingConfig
from qarl.rollout.publish.manifest import PublishReport
from qarl.rollout.publish.wire import TransferFailed
from qarl.rollout.publish.writers import ReloadFailed
from qarl.tbpo import reduce_metrics, tbpo_loss
from qarl.trainer.advantages import grpo_advantages
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.guard import watch
from qarl.trainer.optim import MasterOptimizer
from qarl.trainer.policy import Policy
from qarl.trainer.setup import RunParts, engine_config, tbpo_config

_BAND_METRICS = ("actor/inside_band_frac", "actor/pos_outside_band_frac", "actor/neg_outside_band_frac")


class LocalTrainer:
    """Everything of one run. `step` counts finished training steps; it is also the version of the published weights.
    `rebuilds` counts the engines that were started in place of a spoilt one. `updated`: this program has trained.
    `warnings`: those of the last step."""

    def __init__(self, config: Config, parts: RunParts, engine: RolloutEngine | None = None) -> None:
        """`engine`: the one to sample with; None starts the one that `config` describes."""
        self.config, self.parts = config, parts
        self.tokenizer = parts.tokenizer
        self.step = self.rebuilds = 0
        self.updated = False
        self.warnings: list[str] = []
        if parts.policy.device.type == "cpu":
            keep_freed_memory()
        self.replace_policy(parts.policy)
        self.engine = engine or RolloutEngine(engine_config(config, routing=bool(stacked_experts(parts.policy.model))))
        self.tbpo = tbpo_config(config.actor)
        self.timer = PhaseTimer(torch.cuda.synchronize if self.policy.device.type == "cuda" else None)

    def replace_policy(self, policy: Policy) -> None:
        """Train `policy` from here on, with a new optimizer."""
        self.policy = policy
        self.optimizer = MasterOptimizer(
            policy.model.named_parameters(),
            self.config.optim,
            total_training_steps=self.config.trainer.total_training_steps,
            seed=self.config.seed,
        )

    def train_step(self) -> dict[str, float]:
        """One step, and its metrics."""
        batch, metrics = self.rollout()
        with self.timer.phase("old_log_prob"):
            old_log_probs = self.old_log_probs(batch)
        metrics |= mismatch_metrics(old_log_probs, batch.rollout_log_probs, batch.response_mask)
        watched, self.warnings = watch(
            self.config,
            self.policy.align,
            batch,
            metrics,
            before_first_update=not self.updated,
            on_gpu=self.policy.device.type == "cuda",
        )
        with measure_phases() as quantizing:
            with self.timer.phase("update"):
                self.updated = True
                metrics |= watched | self.update(batch, old_log_probs)
            self.step += 1
            report = self.publish()
        return metrics | publish_metrics(report, quantizing) | {"publish/rebuilds": self.rebuilds}

    def rollout(self, *, top_tokens: bool = False) -> tuple[Batch, dict[str, float]]:
        """Sample, score and pad: the batch of this step; with `top_tokens` also the engine's likeliest tokens."""
        config = self.config
        prompts = [self.parts.train_prompts[i] for i in next(self.parts.sampler)]
        repeated = [prompt for prompt in prompts for _ in range(config.rollout.n)]
        seeds = [request_seed(config.seed, self.step, i) for i in range(len(repeated))]
        sampling = sampling_config(config, top_tokens=top_tokens)
        with self.timer.phase("rollout"):
            responses = self.generate([prompt.prompt_token_ids for prompt in repeated], sampling, seeds)
        if responses.weight_version != self.step:
            raise RuntimeError(f"step {self.step} was sampled from weights of version {responses.weight_version}")
        with self.timer.phase("reward"):
            rewards = torch.tensor(self.score(repeated, responses))
        advantages = grpo_advantages(
            rewards,
            [i // config.rollout.n for i in range(len(repeated))],
            norm_adv_by_std_in_grpo=config.algorithm.norm_adv_by_std_in_grpo,
        )
        batch = make_batch(responses, rewards, advantages, pad_token_id=self.parts.pad_token_id).to(self.policy.device)
        lengths = [len(response) for response in responses.response_token_ids]
        metrics = response_metrics(
            rewards, lengths, config.data.max_response_length, finish_reasons=responses.finish_reasons
        )
        return batch, metrics | {"rollout/preemptions": float(responses.preemptions)}

    @torch.no_grad()
    def old_log_probs(self, batch: Batch) -> torch.Tensor:
        """The policy's log-probs before the update: FP32 [B, R]. With top-p or top-k also what they keep, for
        the whole update: `batch.kept`."""
        size = self.config.actor.log_prob_micro_batch_size_per_gpu
        how: dict[str, Any] = {
            "temperature": self.config.rollout.temperature,
            "truncation": truncation(self.config),
        }
        parts = [self.policy.response_log_probs(batch, rows, **how) for rows in batch.micro_batches(size)]
        return torch.cat(parts)

    def update(self, batch: Batch, old_log_probs: torch.Tensor) -> dict[str, float]:
        """`ppo_epochs` passes over the mini-batches, an optimizer step each; none if the gradient is not finite."""
        actor = self.config.actor
        size = actor.ppo_mini_batch_size * self.config.rollout.n
        statistics: list[dict[str, float]] = []
        later: list[dict[str, float]] = []
        norms: list[float] = []
        for epoch in range(actor.ppo_epochs):
            for start in range(0, len(batch), size):
                stop = min(start + size, len(batch))
                gathered = self.backward(batch, old_log_probs, start, stop)
                statistics += gathered
                if epoch or start:
                    later += gathered
                norms.append(self.optimizer_step())
        skipped = sum(not math.isfinite(norm) for norm in norms)
        metrics = reduce_metrics(statistics) | {
            "actor/pg_loss": sum(one["sum/loss"] for one in statistics) / len(norms),
            "actor/grad_norm": sum(norms) / len(norms),
            "actor/lr": self.optimizer.lr,
            "actor/skipped_steps": skipped,
        }
        # The first mini-batch is on-policy, r = 1 by construction: whether the bands fit shows from the second on.
        after_first = reduce_metrics(later)
        metrics |= {f"{name}_after_first": after_first[name] for name in _BAND_METRICS if name in after_first}
        self.optimizer.scheduler_step()
        return metrics

    def backward(self, batch: Batch, old_log_probs: torch.Tensor, start: int, stop: int) -> list[dict[str, float]]:
        """Gradients of the mini-batch rows start to stop, summed over its micro-batches; TBPO's statistics of each."""
        responses = int(batch.response_mask[start:stop].any(1).sum())
        statistics = []
        size = self.config.actor.ppo_micro_batch_size_per_gpu
        for rows in batch.micro_batches(size, start=start, stop=stop):
            with self.timer.phase("forward"):
                loss, found = self.loss(batch, old_log_probs, rows, responses)
            with self.timer.phase("backward"):
                self.accumulate(loss)
            statistics.append(found | {"sum/loss": loss.item()})
        return statistics

    def loss(
        self, batch: Batch, old_log_probs: torch.Tensor, rows: slice, responses: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The forward of a micro-batch out of a mini-batch of `responses` responses: its loss and TBPO's statistics."""
        return tbpo_loss(
            self.policy.response_log_probs(batch, rows, temperature=self.config.rollout.temperature),
            old_log_probs[rows],
            batch.rollout_log_probs[rows],
            batch.advantages[rows],
            batch.response_mask[rows],
            self.tbpo,
            global_batch_size=max(responses, 1),
        )

    def accumulate(self, loss: torch.Tensor) -> None:
        """The backward of a micro-batch; its gradients join the FP32 sums."""
        loss.backward()
        self.policy.end_replay()
        self.optimizer.accumulate()

    def optimizer_step(self) -> float:
        """Move the weights and quantize them again; returns the gradient's norm. If that is not finite, the
        weights stay."""
        with self.timer.phase("optimizer"):
            norm = self.optimizer.clip_grad_norm(self.config.actor.grad_clip)
            moved = math.isfinite(norm)
            if moved:
                self.optimizer.step()
            self.optimizer.zero_grad()
        if moved:
            with self.timer.phase("quantize"):
                self.policy.requantize()
        return norm

    def publish(self) -> PublishReport:
        """Quantize once, and give the engine the tensors that the next forward multiplies by.

        What was damaged on the way is sent once more, to each engine; a lost engine is replaced once if
        `rollout.rebuild_on_failure`. The error of the last attempt is raised.
        """
        with self.timer.phase("quantize"):
            tensors = self.policy.quantize()
        with self.timer.phase("publish"):
            resends = rebuilds = 1
            while True:
                try:
                    return self.engine.publish(tensors, version=self.step)
                except (TransferFailed, OSError):
                    if not resends:
                        raise
                    resends -= 1
                except ReloadFailed as error:
                    if not rebuilds:
                        raise
                    self.rebuild_engine(error)
                    resends, rebuilds = 1, rebuilds - 1

    def generate(
        self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None = None
    ) -> RolloutBatch:
        """`RolloutEngine.generate`; with `rollout.rebuild_on_failure` once more on another engine."""
        try:
            return self.engine.generate(prompts, sampling, seeds)
        except EngineFailed as error:
            self.rebuild_engine(error)
            self.publish()
            return self.engine.generate(prompts, sampling, seeds)

    def rebuild_engine(self, error: Exception) -> None:
        """Start another engine in place of a lost one, or raise `error` if that is not asked for."""
        if not self.config.rollout.rebuild_on_failure:
            raise error
        print(f"warning: {error}\n  the rollout engine is restarted", file=sys.stderr)
        self.engine.rebuild()
        self.rebuilds += 1

    def evaluate(self) -> dict[str, float]:
        """Mean reward of greedy responses to the held-out prompts (with a 0/1 reward, the accuracy)."""
        prompts = self.parts.val_prompts
        with self.timer.phase("eval"):
            sampling = SamplingConfig(self.config.data.max_response_length, temperature=0.0)
            responses = self.generate([prompt.prompt_token_ids for prompt in prompts], sampling)
            scores = self.score(prompts, responses)
        return {"val/accuracy": sum(scores) / len(scores)}

    def score(self, prompts: Sequence[Prompt], responses: RolloutBatch) -> list[float]:
        """The reward of each response."""
        timeout_s = self.config.reward.timeout_s
        return score_responses(self.parts.reward_fn, prompts, self.decode(responses), timeout_s=timeout_s)

    def decode(self, responses: RolloutBatch) -> list[str]:
        texts: list[str] = self.tokenizer.batch_decode(responses.response_token_ids, skip_special_tokens=True)
        return texts


def request_seed(seed: int, step: int, index: int) -> int:
    """A sampling seed that depends on run seed, step and place in the batch alone."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def publish_metrics(report: PublishReport, quantizing: Mapping[str, float]) -> dict[str, float]:
    """`publish/*`: bytes, their ratio to BF16 in the quantized layers, and seconds of each part.

    `quantizing`: those of the quantizer, over all optimizer steps of the training step; the others are the publish's.
    """
    metrics = {"publish/mbytes": report.bytes / 1e6, "publish/quantized_ratio": report.quantized_ratio}
    return metrics | {f"publish/{phase}_s": seconds for phase, seconds in {**quantizing, **report.seconds}.items()}
