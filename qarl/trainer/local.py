"""The local backend, with trainer and vLLM in one process. Read this file to learn the algorithm.

`LocalTrainer.train_step` is a training step. Its stages are (`LocalTrainer.rollout` has the first three):

    rollout        prompts -> responses and their log-probs, sampled from the engine's low-bit weights
    rewards        responses -> a reward each. With `rollout.environment` a response is a conversation (`qarl.turns`)
    advantages     rewards -> group-relative advantages (`qarl.trainer.advantages`)
    old log-probs  batch -> the trainer's own log-probs, by the kernels of the update. Where they equal the rollout's, a
                   step may take those instead (`qarl.trainer.old_log_probs`)
    update         batch, old log-probs -> new weights, by the objective of actor.loss (TBPO), with one optimizer step
                   per ppo_mini_batch_size prompts
    publish        weights -> the engine, as the tensors that the next forward multiplies by, under a new version

verl's trainer has the same stages on Ray and FSDP2. Nothing is sampled between the optimizer steps of a training step,
so weights are published only after the last one. `rollout.rebuild_on_failure` chooses an engine that survives failures
of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from qarl.config import Config
from qarl.console import stage
from qarl.data.prompts import Prompt, with_samples
from qarl.data.response_text import response_texts
from qarl.data.reward_outcomes import Scored as Outcome
from qarl.data.scoring import scored_responses
from qarl.data.votes import vote_of
from qarl.data.weighted_reward import part_means
from qarl.kernels.sampling_masks import Truncation
from qarl.metrics.error_tokens import text_metrics, text_statistics
from qarl.metrics.phase_timer import PhaseTimer, clock_of
from qarl.metrics.step_metrics import response_metrics
from qarl.metrics.validation import Answer, answers_metrics
from qarl.objectives import verl_functions
from qarl.objectives.loss import correction_weights, objective_loss
from qarl.objectives.metrics import update_metrics
from qarl.objectives.settings import objective_settings
from qarl.process import keep_freed_memory
from qarl.progress import live
from qarl.quant.quantize import measure_phases
from qarl.quant.state_dict import requantize
from qarl.rollout.engine import RolloutEngine, SamplingConfig
from qarl.rollout.publish.manifest import PublishReport
from qarl.rollout.recovery import RecoveringEngine
from qarl.rollout.requests import RolloutBatch
from qarl.rollout.turns import scored_prompts
from qarl.step.updates import is_skipped
from qarl.tbpo.reading import Unread, read
from qarl.trainer.advantages import step_advantages
from qarl.trainer.batch import Batch, Rows, index_of, make_batch, micro_batches, request_seed
from qarl.trainer.group_filter import Scored, groups_that_differ
from qarl.trainer.master_optimizer import MasterOptimizer
from qarl.trainer.mismatch_watch import check_batch, log_step_samples, watch
from qarl.trainer.old_log_probs import OldLogProbs
from qarl.trainer.overlong import mask_truncated, overlong_penalties, penalty_metrics
from qarl.trainer.policy import Policy
from qarl.trainer.prepare import RunParts, engine_config
from qarl.trainer.sampled_from import leave_out_early_ends
from qarl.turns.metrics import turn_metrics

EVALUATION = -1
"""Replaces the step in `request_seed` for sampled evaluations, which so have the same seeds each time."""
SAMPLED_ROWS = -1
"""Replaces the index in `request_seed` for the random rows that `actor.old_log_probs=auto` checks."""

Statistics = dict[str, float]
Confirm = Callable[[Batch, torch.Tensor, torch.Tensor], torch.Tensor]


class LocalTrainer:
    """The state of one run and its training step.

    step       number of finished training steps, which is also the version of the published weights
    updated    whether this program has begun an update
    warnings   the warnings of the last step
    source     computes the old log-probs of a step, or takes the rollout's
    reference  the policy before the first step, for the KL term of actor.use_kl_loss, or None. It is quantized and
               aligned too, so the first KL is exactly 0. verl's is not, so verl's KL also contains the quantization
    """

    reference: Policy | None = None

    def __init__(
        self, config: Config, parts: RunParts, engine: RolloutEngine | None = None
    ) -> None:
        """`engine`: the engine to sample with. If it is None, start the engine that `config` describes."""
        self.config = config
        self.parts = parts
        self.tokenizer = parts.tokenizer
        self.step, self.updated, self.warnings = 0, False, list[str]()
        if parts.policy.device.type == "cpu":
            keep_freed_memory()
        self.replace_policy(parts.policy)
        self.objective = objective_settings(config)
        self.source = OldLogProbs(config, self.old_log_probs)
        if self.objective.use_kl_loss:
            # Before the engine, which is awake at first and takes its whole share of the GPU.
            self.reference = Policy.load(config).freeze()
        if engine is None:
            with stage("starting the rollout engine (vLLM)"):
                settings = engine_config(config, self.policy, routing=self.policy.has_experts)
                recovers = config.rollout.rebuild_on_failure
                engine = RecoveringEngine(settings) if recovers else RolloutEngine(settings)
        self.engine = engine
        self.timer = PhaseTimer(clock_of(self.policy.device))

    def replace_policy(self, policy: Policy) -> None:
        """Train `policy` from now on, with a new optimizer."""
        self.policy = policy
        self.optimizer = MasterOptimizer(
            policy.model.named_parameters(),
            self.config.optim,
            total_training_steps=self.config.trainer.total_training_steps,
            seed=self.config.seed,
            scale_loss=self.config.model.dtype == "fp16",
        )

    def train_step(self) -> dict[str, float]:
        """Run one training step. Return its metrics."""
        config = self.config
        batch, metrics = self.rollout()
        with self.timer.phase("old_log_prob"):
            old_log_probs = self.source.begin(
                batch, seed=request_seed(config.seed, self.step, SAMPLED_ROWS)
            )
        if not self.updated:
            mismatch = self.source.mismatch(batch)
            check_batch(config, self.policy.limit_level, batch, mismatch, before_first_update=True)
        if self.reference is not None:
            with self.timer.phase("reference"):
                # Without other_experts, because the reference's routers are not the policy's.
                batch.reference_log_probs = self.reference.batch_log_probs(
                    replace(batch, other_experts=None), config
                )
        with measure_phases() as quantizing:
            with self.timer.phase("update"):
                self.updated = True
                metrics |= self.update(batch, old_log_probs, self.source.confirm_or_recompute)
            self.step += 1
            report = self.publish()
        metrics |= self.source.mismatch(batch) | self.source.metrics() | report.metrics(quantizing)
        metrics |= {"publish/rebuilds": self.engine.rebuilds}
        watched, warnings = watch(config, self.policy, batch, metrics)
        self.warnings = warnings + self.source.messages
        log_step_samples(config, self.step, batch, self.source.measured, self.tokenizer)
        return metrics | watched

    def rollout(self, *, top_tokens: bool = False) -> tuple[Batch, dict[str, float]]:
        """Sample and score responses. Return the batch of this step, and metrics. `top_tokens`: also store the engine's
        likeliest token at each position in the batch."""
        config = self.config
        sampling = SamplingConfig.of_run(config, top_tokens=top_tokens)
        sample = partial(self.scored, sampling)
        keys = config.filter_groups
        filtered = dict[str, float]()
        if keys.enable:
            scored, filtered = groups_that_differ(
                sample,
                groups=config.data.train_batch_size,
                size=config.rollout.n,
                limit=keys.max_num_gen_batches,
            )
            with self.timer.phase("rollout"):
                self.engine.sleep()
        else:
            scored = sample()
        responses = scored.responses
        lengths = responses.sampled_lengths
        rewards, overlong = self.shaped(scored)
        advantages = step_advantages(config, rewards, lengths)
        batch = make_batch(responses, rewards, advantages, pad_token_id=self.parts.pad_token_id)
        if config.rollout.min_tokens:
            leave_out_early_ends(batch, config.rollout.min_tokens, self.parts.ends)
        if config.actor.mask_truncated_responses:
            overlong |= mask_truncated(batch, responses)
        batch = batch.to(self.policy.device)
        metrics = response_metrics(rewards, lengths, responses.finish_reasons)
        if responses.conversations is not None:
            metrics |= turn_metrics(responses.conversations)
        vocabulary = len(self.tokenizer)
        text = text_statistics(
            batch.responses,
            batch.rollout_log_probs,
            batch.advantages,
            batch.response_mask,
            vocabulary=vocabulary,
        )
        metrics |= part_means(scored.outcomes, self.config.reward.labels)
        return batch, metrics | text_metrics([text]) | filtered | overlong | {
            "rollout/preemptions": float(responses.preemptions)
        }

    def scored(self, sampling: SamplingConfig, number: int = 0) -> Scored:
        """Sample the responses to the next prompts, and score them. `number`: of this batch within the step."""
        config = self.config
        prompts = [
            self.parts.train_prompts[i]
            for i in next(self.parts.sampler)
            for _ in range(config.rollout.n)
        ]
        first = number * len(prompts)
        seeds = [request_seed(config.seed, self.step, first + i) for i in range(len(prompts))]
        with self.timer.phase("rollout"):
            responses = self.sample(prompts, sampling, seeds, phase="rollout")
            if not config.filter_groups.enable:
                self.engine.sleep()
        if responses.weight_version != self.step:
            raise RuntimeError(
                f"step {self.step} was sampled from weights of version {responses.weight_version}"
            )
        with self.timer.phase("reward"):
            outcomes = self.rewards(prompts, responses)
        rewards = torch.tensor([outcome.score for outcome in outcomes])
        return Scored(prompts, responses, rewards, outcomes)

    def shaped(self, scored: Scored) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the rewards with the punishment of long responses, and its metrics."""
        reward = self.config.reward
        if reward.overlong_buffer_len is None:
            return scored.rewards, {}
        penalties = overlong_penalties(
            [len(response) for response in scored.responses.response_token_ids],
            limit=self.config.data.max_response_length,
            buffer=reward.overlong_buffer_len,
            factor=reward.overlong_penalty_factor,
        )
        return scored.rewards + penalties, penalty_metrics(penalties)

    def rewards(
        self,
        prompts: Sequence[Prompt],
        responses: RolloutBatch,
        texts: Sequence[str] | None = None,
    ) -> list[Outcome]:
        """Return the reward of each response, and what the function returned with it. `texts`: of the responses, if the
        caller has them."""
        reward = self.config.reward
        scored = scored_prompts(prompts, responses, reward.names)
        texts = self.texts(responses) if texts is None else texts
        return scored_responses(self.parts.reward_fn, scored, texts, timeout_s=reward.timeout_s)

    def texts(self, responses: RolloutBatch) -> list[str]:
        """Return the text of each response, as the reward reads it."""
        keep = self.config.reward.keep_special_tokens
        return response_texts(
            self.tokenizer, responses.response_token_ids, keep_special_tokens=keep
        )

    def old_log_probs(self, batch: Batch, only: torch.Tensor | None = None) -> torch.Tensor:
        """Return the policy's log-probs before the update, FP32 [B, R]. If `only` is set, all other rows are 0.

        With top-p or top-k, also store the tokens that these leave in `batch.sampling_mask`, for all other forwards."""
        return self.policy.batch_log_probs(
            batch,
            self.config,
            truncation=Truncation(self.config.rollout.top_p, self.config.rollout.top_k),
            only=only,
        )

    def update(
        self, batch: Batch, old_log_probs: torch.Tensor, confirm: Confirm | None = None
    ) -> dict[str, float]:
        """Do `ppo_epochs` passes over the batch, with one optimizer step per mini-batch. Return metrics.

        `confirm`: called once, before any weight changes, with `old_log_probs` and the log-probs of the first
        mini-batch. If it returns other old log-probs, the update uses these. An optimizer step whose gradient is not
        finite is skipped."""
        actor = self.config.actor
        size = actor.ppo_mini_batch_size * self.config.rollout.n
        self.weigh(batch, old_log_probs)
        mini_batches = list[list[Statistics]]()
        norms = list[float]()
        parts = [(rows, self.split(batch, rows)) for rows in batch.micro_batches(size)]
        parts *= actor.ppo_epochs
        total = sum(len(split) for _, split in parts)
        with live.phase("update", total=total, unit="micro-batches") as phase:
            for rows, split in parts:
                statistics, log_probs = self.backward(batch, old_log_probs, rows, split)
                if confirm is not None and not norms:
                    with self.timer.phase("old_log_prob", not_in="update"):
                        confirmed = confirm(batch, old_log_probs, log_probs)
                    if confirmed is not old_log_probs:
                        old_log_probs = confirmed
                        self.optimizer.zero_grad()
                        self.weigh(batch, old_log_probs)
                        phase.extend(len(split))
                        statistics, _ = self.backward(batch, old_log_probs, rows, split)
                mini_batches.append(statistics)
                norms.append(self.optimizer_step())
        metrics = update_metrics(mini_batches) | self.optimizer.metrics(norms)
        self.optimizer.scheduler_step()
        return metrics

    def weigh(self, batch: Batch, old_log_probs: torch.Tensor) -> None:
        """Store the weights for the mismatch between rollout and `old_log_probs` in the batch."""
        batch.weights = correction_weights(
            old_log_probs, batch.rollout_log_probs, batch.response_mask, self.objective.correction
        )

    def split(self, batch: Batch, mini_batch: slice) -> list[Rows]:
        """Return the micro-batches of one mini-batch. `mini_batch`: its rows."""
        return micro_batches(batch, self.config.actor, start=mini_batch.start, stop=mini_batch.stop)

    def backward(
        self,
        batch: Batch,
        old_log_probs: torch.Tensor,
        mini_batch: slice,
        split: Sequence[Rows] | None = None,
    ) -> tuple[list[Statistics], torch.Tensor]:
        """Compute the gradients of one mini-batch, summed over its micro-batches in FP32. `mini_batch`: its rows.
        `split`: its micro-batches, if the caller has them.

        Return the objective's statistics for each micro-batch, and the rows' log-probs, FP32 [rows, R]. The host waits
        for the device once, at the end, and raises there what the objective's checks have found."""
        lengths = batch.host_lengths.sampled[mini_batch]
        whole = {"responses": sum(length > 0 for length in lengths), "tokens": sum(lengths)}
        statistics = list[Unread]()
        log_probs = torch.zeros_like(batch.rollout_log_probs)
        for rows in split or self.split(batch, mini_batch):
            with self.timer.phase("forward"):
                new = self.policy.response_log_probs(
                    batch, rows, temperature=self.config.rollout.temperature
                )
                loss, values = self.loss(batch, old_log_probs, rows, new, whole)
            with self.timer.phase("backward"):
                (loss * self.optimizer.loss_scale.scale).backward()
                self.policy.end_replay()
                self.optimizer.accumulate()
            statistics.append(values | {"sum/loss": loss.detach()})
            log_probs[index_of(rows)] = new.detach()
            live.advance()
        return read(statistics), log_probs[mini_batch]

    def loss(
        self,
        batch: Batch,
        old_log_probs: torch.Tensor,
        rows: Rows,
        new: torch.Tensor,
        whole: Mapping[str, int],
    ) -> tuple[torch.Tensor, Unread]:
        """Return the loss of one micro-batch and the objective's statistics. `new`: its log-probs, [rows, R].

        `whole`: number of non-empty responses in the whole mini-batch, and number of their tokens."""
        index = index_of(rows)
        mask = batch.response_mask[index]
        weight = None if batch.weights is None else batch.weights[index]
        loss, statistics = objective_loss(
            new,
            old_log_probs[index],
            batch.rollout_log_probs[index],
            batch.advantages[index],
            mask,
            self.objective,
            weight=weight,
            **whole,
        )
        if batch.reference_log_probs is None or self.objective.kl_loss_coef is None:
            return loss, statistics
        kl = verl_functions.kl_term(
            new, batch.reference_log_probs[index], mask, self.objective, **whole
        )
        return loss + self.objective.kl_loss_coef * kl, statistics | {"sum/kl_loss": kl.detach()}

    def optimizer_step(self) -> float:
        """Update the weights and quantize them again, if the gradient's norm is finite. Return the norm."""
        with self.timer.phase("optimizer"):
            norm = self.optimizer.clip_and_step(self.config.actor.grad_clip)
        if not is_skipped(norm):
            with self.timer.phase("quantize"):
                requantize(self.policy.model)
        return norm

    def publish(self) -> PublishReport:
        """Send the engine what the next forward multiplies by, as version `step`. With adapters, the base only once."""
        weights = partial(self.policy.publish, phase=self.timer.phase)
        with self.timer.phase("publish"), live.phase("publishing"):
            return self.engine.publish_from(weights, version=self.step)

    def sample(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        seeds: list[int] | None = None,
        *,
        phase: str,
    ) -> RolloutBatch:
        """Sample a response to each prompt. If there is an environment, hold a conversation that begins with it.
        `phase`: the phase of the timer around this."""
        conversations = self.parts.conversations
        if conversations is None:
            return self.generate([prompt.prompt_token_ids for prompt in prompts], sampling, seeds)
        timed = partial(self.timer.phase, "environment", not_in=phase)
        return conversations.hold(self.engine, prompts, sampling, seeds, timed=timed)

    def generate(
        self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None = None
    ) -> RolloutBatch:
        """Sample a turn after each prompt."""
        return self.engine.generate(prompts, sampling, seeds)

    def evaluate(self) -> dict[str, float]:
        """Return the mean reward of the responses to the held-out prompts, and that of each data source if there are
        several. With 0/1 rewards, this is accuracy. A prompt gets one greedy response, or at
        `rollout.val_temperature` as many as its row (`__rollout_n__`) or `rollout.val_n` says."""
        keys = self.config.rollout
        greedy = keys.val_temperature == 0
        prompts = [
            prompt
            for prompt in with_samples(self.parts.val_prompts, keys.val_n)
            for _ in range(1 if greedy else prompt.samples or 1)
        ]
        seeds = [request_seed(self.config.seed, EVALUATION, i) for i in range(len(prompts))]
        with self.timer.phase("eval"):
            sampling = SamplingConfig.of_evaluation(self.config)
            responses = self.sample(prompts, sampling, None if greedy else seeds, phase="eval")
            texts = self.texts(responses)
            outcomes = self.rewards(prompts, responses, texts)
        scoring = self.config.reward
        parts = part_means(outcomes, scoring.labels)
        votes = [
            vote_of(scoring.names, text, outcome)
            for text, outcome in zip(texts, outcomes, strict=True)
        ]
        answers = zip(prompts, outcomes, votes, strict=True)
        return {f"val/{name}": value for name, value in parts.items()} | answers_metrics(
            Answer(prompt.data_source, prompt.index, outcome.score, vote)
            for prompt, outcome, vote in answers
        )
