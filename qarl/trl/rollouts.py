"""TRL's `rollout_func` with QaRL's engine. It publishes changed weights, then samples one response to each prompt.

Each process runs its own engine and samples its own part of the batch. After an optimizer step all processes have the
same weights, so each publishes its weights to its own engine.
"""

from __future__ import annotations

from typing import Any

from qarl.rollout.engine import RolloutEngine, SamplingConfig
from qarl.rollout.publish.wire import PublishReport
from qarl.trainer.local import request_seed
from qarl.trainer.policy import Policy

EVALUATION = 2**40
"""Evaluations count their requests from this index in `request_seed`. No step has as many rollouts."""


class Rollouts:
    """`published`: step and version counters of the weights that were last published. `report`: until it is logged."""

    def __init__(self, policy: Policy, engine: RolloutEngine) -> None:
        self.policy, self.engine = policy, engine
        self.published: tuple[int, tuple[int, ...]] | None = None
        self.report: PublishReport | None = None
        self._calls: dict[bool, tuple[int, int]] = {}

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return `prompt_ids`, `completion_ids` and `logprobs` for TRL. Prompts are already repeated."""
        token_ids, _, _ = trainer._tokenize_prompts(prompts)
        step = trainer.state.global_step
        self.publish(step)
        seeds = self._seeds(trainer, step, len(prompts))
        sampling = SamplingConfig(trainer.max_completion_length, temperature=trainer.temperature)
        found = self.engine.generate(token_ids, sampling, seeds)
        self.engine.sleep()
        return {
            "prompt_ids": found.prompt_token_ids,
            "completion_ids": found.response_token_ids,
            "logprobs": found.rollout_log_probs,
        }

    def publish(self, step: int) -> None:
        """Send the engine the weights of `step`, if it does not have them.

        Weights can also change without a step, for example when transformers loads the best checkpoint. So the version
        counters of the parameters are compared too."""
        now = (step, tuple(parameter._version for parameter in self.policy.model.parameters()))
        if self.published == now and not self.engine.stale:
            return
        self.report = self.engine.publish(self.policy.quantize(), version=step)
        self.published = now

    def _seeds(self, trainer: Any, step: int, count: int) -> list[int]:
        """Return a seed for each request. It depends on the run's seed, the step, and the request's index in the batch
        of all processes. Evaluations use different seeds, so they do not change the rollouts of training."""
        training = trainer.training
        last, calls = self._calls.get(training, (step, -1))
        calls = calls + 1 if last == step else 0
        self._calls[training] = (step, calls)
        start = (calls * trainer.accelerator.num_processes + trainer.accelerator.process_index) * count
        start += 0 if training else EVALUATION
        return [request_seed(trainer.args.seed, step, start + i) for i in range(count)]
