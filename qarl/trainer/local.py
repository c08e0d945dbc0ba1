"""The local backend, with trainer and vLLM in one process. Read this file to learn the algorithm.

One training step has one function per stage:

    rollout       sample rollout.n responses per prompt from the engine's low-bit weights
    reward        score the responses and compute group-relative advantages
    old_log_prob  compute the trainer's own log-probs, with the same kernels as the update, or skip this pass
                  (`qarl.trainer.old_log_probs`)
    update        minimise the objective of actor.loss (TBPO), with one optimizer step per ppo_mini_batch_size prompts
    publish       send the engine the tensors that the next forward multiplies by, as a new version

verl's trainer has the same stages on Ray and FSDP2. Weights are published only once per training step, after its last
optimizer step, because nothing is sampled between the optimizer steps.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence

import torch

from qarl.checks.sampling import sampling_config, truncation
from qarl.config import Config
from qarl.console import stage
from qarl.data import Prompt
from qarl.data.rewards import score_responses
from qarl.metrics.error_tokens import text_metrics, text_statistics
from qarl.metrics.mismatch import PhaseTimer, response_metrics
from qarl.objectives.loss import batch_weights, objective_loss
from qarl.objectives.metrics import after_first_metrics, reduce_metrics
from qarl.objectives.settings import objective_settings
from qarl.optim.loss_scale import LossScale
from qarl.process import keep_freed_memory
from qarl.quant.phases import measure_phases
from qarl.quant.stacks import stacked_experts
from qarl.rollout.engine import EngineFailed, RolloutBatch, RolloutEngine, SamplingConfig
from qarl.rollout.gpu import drop_frames
from qarl.rollout.publish.manifest import PublishReport
from qarl.rollout.publish.wire import TransferFailed
from qarl.rollout.publish.writers import ReloadFailed, TensorsMoved
from qarl.trainer.advantages import step_advantages
from qarl.trainer.batch import Batch, Rows, make_batch
from qarl.trainer.guard import watch
from qarl.trainer.old_log_probs import OldLogProbs, RolloutDiffers
from qarl.trainer.optim import MasterOptimizer
from qarl.trainer.packing import micro_batches
from qarl.trainer.policy import Policy
from qarl.trainer.reference import Reference
from qarl.trainer.report import log_samples
from qarl.trainer.setup import RunParts, engine_config

SAMPLED_ROWS = -1
"""Replaces the index in `request_seed` for the random rows that `actor.old_log_probs=auto` checks."""


class LocalTrainer:
    """The state of one run and its training step.

    step       number of finished training steps, which is also the version of the published weights
    rebuilds   number of engines that were started to replace a lost engine
    updated    whether this program has begun an update
    warnings   the warnings of the last step
    source     returns the old log-probs of a step
    reference  the reference policy of the KL term, or None without actor.use_kl_loss
    """

    reference: Reference | None = None

    def __init__(self, config: Config, parts: RunParts, engine: RolloutEngine | None = None) -> None:
        """`engine`: the engine to sample with. If it is None, start the engine that `config` describes."""
        self.config, self.parts = config, parts
        self.tokenizer = parts.tokenizer
        self.step = self.rebuilds = 0
        self.updated = False
        self.warnings: list[str] = []
        if parts.policy.device.type == "cpu":
            keep_freed_memory()
        self.replace_policy(parts.policy)
        self.objective = objective_settings(config)
        self.source = OldLogProbs(config)
        if self.objective.use_kl_loss:
            # Before the engine, which is awake at first and takes its whole share of the GPU.
            self.reference = Reference(config, self.objective)
        routing = bool(stacked_experts(parts.policy.model))
        if engine is None:
            with stage("starting the rollout engine (vLLM)"):
                engine = RolloutEngine(engine_config(config, level=self.policy.align, routing=routing))
        self.engine = engine
        self.loss_scale = LossScale(active=config.model.dtype == "fp16")
        self.timer = PhaseTimer(torch.cuda.synchronize if self.policy.device.type == "cuda" else None)

    def replace_policy(self, policy: Policy) -> None:
        """Train `policy` from now on, with a new optimizer."""
        self.policy = policy
        self.optimizer = MasterOptimizer(
            policy.model.named_parameters(),
            self.config.optim,
            total_training_steps=self.config.trainer.total_training_steps,
            seed=self.config.seed,
        )

    def train_step(self) -> dict[str, float]:
        """Run one training step. Return its metrics."""
        batch, metrics = self.rollout()
        with self.timer.phase("old_log_prob"):
            seed = request_seed(self.config.seed, self.step, SAMPLED_ROWS)
            old_log_probs = self.source.begin(batch, self.old_log_probs, seed=seed)
        if compared := self.source.recomputed:
            metrics |= self.compare(batch, metrics)
        if self.reference is not None:
            with self.timer.phase("reference"):
                self.reference.begin(batch)
        with measure_phases() as quantizing:
            with self.timer.phase("update"):
                self.updated = True
                metrics |= self.proven_update(batch, old_log_probs)
            self.step += 1
            report = self.publish()
        if not compared:
            metrics |= self.compare(batch, metrics)
        log_samples(self.config, self.step, batch, self.source.measured, self.tokenizer)
        self.warnings += self.source.messages
        metrics |= self.source.metrics()
        if self.config.quant.kernels == "dequantized":
            metrics["publish/dequantized"] = 1.0
        return metrics | publish_metrics(report, quantizing) | {"publish/rebuilds": self.rebuilds}

    def rollout(self, *, top_tokens: bool = False) -> tuple[Batch, dict[str, float]]:
        """Sample and score responses. Return the batch of this step, and metrics.

        `top_tokens`: also store the engine's likeliest token at each position in the batch."""
        config = self.config
        prompts = [self.parts.train_prompts[i] for i in next(self.parts.sampler)]
        repeated = [prompt for prompt in prompts for _ in range(config.rollout.n)]
        seeds = [request_seed(config.seed, self.step, i) for i in range(len(repeated))]
        sampling = sampling_config(config, top_tokens=top_tokens)
        with self.timer.phase("rollout"):
            responses = self.generate([prompt.prompt_token_ids for prompt in repeated], sampling, seeds)
            self.let_engine_sleep()
        if responses.weight_version != self.step:
            raise RuntimeError(f"step {self.step} was sampled from weights of version {responses.weight_version}")
        with self.timer.phase("reward"):
            rewards = torch.tensor(self.score(repeated, responses))
        lengths = [len(response) for response in responses.response_token_ids]
        advantages = step_advantages(config, rewards, lengths)
        batch = make_batch(responses, rewards, advantages, pad_token_id=self.parts.pad_token_id).to(self.policy.device)
        metrics = response_metrics(
            rewards, lengths, config.data.max_response_length, finish_reasons=responses.finish_reasons
        )
        text = text_statistics(
            batch.responses,
            batch.rollout_log_probs,
            batch.advantages,
            batch.response_mask,
            vocabulary=len(self.tokenizer),
        )
        return batch, metrics | text_metrics([text]) | {"rollout/preemptions": float(responses.preemptions)}

    @torch.no_grad()
    def old_log_probs(self, batch: Batch, only: torch.Tensor | None = None) -> torch.Tensor:
        """Return the policy's log-probs before the update, FP32 [B, R]. If `only` is given, all other rows are 0.

        With top-p or top-k, also store the kept tokens in `batch.kept`. All forwards of the update use them."""
        temperature, kept = self.config.rollout.temperature, truncation(self.config)
        found = torch.zeros_like(batch.rollout_log_probs)
        for rows in micro_batches(batch, self.config.actor, log_probs=True, only=only):
            found[rows] = self.policy.response_log_probs(batch, rows, temperature=temperature, truncation=kept)
        return found

    def compare(self, batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
        """Compare trainer and engine on the rows that this step has measured. Set `warnings` and return metrics.

        `metrics`: those of `rollout`. Raises MismatchError as `watch` does."""
        measured = self.source.mismatch(batch)
        watched, self.warnings = watch(
            self.config,
            self.policy.limit_level,
            batch,
            metrics | measured,
            before_first_update=not self.updated,
            on_gpu=self.policy.device.type == "cuda",
        )
        return measured | watched

    def proven_update(self, batch: Batch, old_log_probs: torch.Tensor) -> dict[str, float]:
        """Call `update`. If its first mini-batch shows that the trainer's log-probs differ from `old_log_probs`, drop
        the gradients, recompute the old log-probs and start again. At that point no weight has changed."""
        try:
            return self.update(batch, old_log_probs)
        except RolloutDiffers:
            self.policy.end_replay()
            self.optimizer.zero_grad()
            with self.timer.phase("old_log_prob"):
                recomputed = self.source.fall_back(batch, self.old_log_probs)
            return self.update(batch, recomputed)

    def update(self, batch: Batch, old_log_probs: torch.Tensor) -> dict[str, float]:
        """Do `ppo_epochs` passes over the batch, with one optimizer step per mini-batch. Return metrics.

        An optimizer step whose gradient is not finite is skipped."""
        actor = self.config.actor
        size = actor.ppo_mini_batch_size * self.config.rollout.n
        batch.weights = batch_weights(old_log_probs, batch.rollout_log_probs, batch.response_mask, self.objective)
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
        finite = [norm for norm in norms if math.isfinite(norm)]
        metrics = reduce_metrics(statistics) | {
            "actor/pg_loss": sum(one["sum/loss"] for one in statistics) / len(norms),
            "actor/lr": self.optimizer.lr,
            "actor/skipped_steps": len(norms) - len(finite),
        }
        # An overflow in FP16 is expected and says nothing about the gradient. In BF16 the metric shows the fault.
        if shown := finite if self.loss_scale.active else norms:
            metrics["actor/grad_norm"] = sum(shown) / len(shown)
        if self.reference is not None:
            metrics["actor/kl_loss"] = sum(one["sum/kl_loss"] for one in statistics) / len(norms)
        if self.loss_scale.active:
            metrics |= {"actor/loss_scale": self.loss_scale.scale, "actor/overflows": self.loss_scale.overflows}
        if self.optimizer.muon_lr is not None:
            metrics["actor/muon_lr"] = self.optimizer.muon_lr
        metrics |= after_first_metrics(later)
        self.optimizer.scheduler_step()
        return metrics

    def backward(self, batch: Batch, old_log_probs: torch.Tensor, start: int, stop: int) -> list[dict[str, float]]:
        """Compute the gradients of one mini-batch (rows `start` to `stop`), summed over its micro-batches.

        Return the objective's statistics for each micro-batch."""
        mask = batch.response_mask[start:stop]
        whole = {"responses": int(mask.any(1).sum()), "tokens": int(mask.sum())}
        statistics = []
        for rows in micro_batches(batch, self.config.actor, start=start, stop=stop):
            with self.timer.phase("forward"):
                loss, found = self.loss(batch, old_log_probs, rows, whole)
            with self.timer.phase("backward"):
                self.accumulate(loss)
            statistics.append(found | {"sum/loss": loss.item()})
        return statistics

    def loss(
        self, batch: Batch, old_log_probs: torch.Tensor, rows: Rows, whole: Mapping[str, int]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Run the forward of one micro-batch, and return its loss and the objective's statistics.

        `whole`: number of non-empty responses in the whole mini-batch, and number of their tokens."""
        log_probs = self.policy.response_log_probs(batch, rows, temperature=self.config.rollout.temperature)
        self.source.see(batch, rows, log_probs)
        loss, found = objective_loss(
            log_probs,
            old_log_probs[rows],
            batch.rollout_log_probs[rows],
            batch.advantages[rows],
            batch.response_mask[rows],
            self.objective,
            weight=None if batch.weights is None else batch.weights[rows],
            **whole,
        )
        if self.reference is None:
            return loss, found
        term, statistic = self.reference.term(batch, rows, log_probs, **whole)
        return loss + term, found | statistic

    def accumulate(self, loss: torch.Tensor) -> None:
        """Run the backward of one micro-batch, and add its gradients to the FP32 sums."""
        (loss * self.loss_scale.scale).backward()
        self.policy.end_replay()
        self.optimizer.accumulate()

    def optimizer_step(self) -> float:
        """Update the weights and quantize them again. Return the gradient's norm.

        If the norm is not finite, the weights do not change."""
        with self.timer.phase("optimizer"):
            norm = self.optimizer.clip_grad_norm(self.config.actor.grad_clip, loss_scale=self.loss_scale.scale)
            moved = math.isfinite(norm)
            self.loss_scale.updated(overflow=not moved)
            if moved:
                self.optimizer.step()
            self.optimizer.zero_grad()
        if moved:
            with self.timer.phase("quantize"):
                self.policy.requantize()
        return norm

    def publish(self) -> PublishReport:
        """Quantize once, and send the engine the tensors that the next forward multiplies by.

        If the tensors are damaged on the way, send them once more. If the engine is lost and
        `rollout.rebuild_on_failure` is set, start one new engine, unless it would have the same fault. If that fails
        too, raise the latest error.
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
                    if not rebuilds or isinstance(error, TensorsMoved):
                        raise
                    self.rebuild_engine(error)
                    resends, rebuilds = 1, rebuilds - 1

    def generate(
        self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None = None
    ) -> RolloutBatch:
        """Call `RolloutEngine.generate`. If the engine is lost, call `rebuild_engine` and try once more."""
        try:
            return self.engine.generate(prompts, sampling, seeds)
        except EngineFailed as error:
            self.rebuild_engine(error)
            self.publish()
            return self.engine.generate(prompts, sampling, seeds)

    def let_engine_sleep(self) -> None:
        """Call `RolloutEngine.sleep`. If that breaks the engine and `rollout.rebuild_on_failure` is set, only warn,
        because the next publish starts a new engine."""
        try:
            self.engine.sleep()
        except EngineFailed as error:
            if not self.config.rollout.rebuild_on_failure:
                raise
            print(f"warning: {error}\n  the next publish restarts the rollout engine", file=sys.stderr)

    def rebuild_engine(self, error: Exception) -> None:
        """Replace a lost engine with a new one. Raise `error` if `rollout.rebuild_on_failure` is not set."""
        if not self.config.rollout.rebuild_on_failure:
            raise error
        print(f"warning: {error}\n  the rollout engine is restarted", file=sys.stderr)
        drop_frames(error)
        self.engine.rebuild()
        self.rebuilds += 1

    def evaluate(self) -> dict[str, float]:
        """Return the mean reward of greedy responses to the held-out prompts. With 0/1 rewards, this is accuracy."""
        prompts = self.parts.val_prompts
        with self.timer.phase("eval"):
            sampling = SamplingConfig(self.config.data.max_response_length, temperature=0.0)
            responses = self.generate([prompt.prompt_token_ids for prompt in prompts], sampling)
            scores = self.score(prompts, responses)
        return {"val/accuracy": sum(scores) / len(scores)}

    def score(self, prompts: Sequence[Prompt], responses: RolloutBatch) -> list[float]:
        """Return the reward of each response."""
        timeout_s = self.config.reward.timeout_s
        return score_responses(self.parts.reward_fn, prompts, self.decode(responses), timeout_s=timeout_s)

    def decode(self, responses: RolloutBatch) -> list[str]:
        texts: list[str] = self.tokenizer.batch_decode(responses.response_token_ids, skip_special_tokens=True)
        return texts


def request_seed(seed: int, step: int, index: int) -> int:
    """Return a sampling seed that depends only on the run's seed, the step and the request's index in the batch."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def publish_metrics(report: PublishReport, quantizing: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics `publish/*`: bytes, the ratio of bytes to BF16 in the quantized layers, changed words, and
    seconds by phase.

    `quantizing`: seconds of the quantizer by phase, summed over all optimizer steps of the training step.
    """
    metrics = {
        "publish/mbytes": report.sent_bytes / 1e6,
        "publish/quantized_ratio": report.quantized_ratio,
        "publish/delta": float(report.is_delta),
        **report.changed,
    }
    return metrics | {f"publish/{phase}_s": seconds for phase, seconds in {**quantizing, **report.seconds}.items()}
