"""The real local trainer on random prompts, with its update timed in parts.

Nothing of a step is written again here: `LocalTrainer` runs it. What is added: phases of their own for forward,
backward and optimizer, responses that do not end early, and several alignment levels on one set of weights, so that the
levels can take steps in turn. They share master weights and optimizer; the low-bit tensors are made for one level at a
time, before its step is timed, as in training the step before leaves them.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from qarl.bench.steps.arguments import Arguments
from qarl.bench.steps.meter import Memory, Meter
from qarl.checks.model_folder import load_tokenizer
from qarl.config import Config, build_config
from qarl.data import Prompt, PromptDataset, PromptSampler
from qarl.quant.linear import invalidate_quantized
from qarl.rollout.engine import RolloutBatch, RolloutEngine, SamplingConfig
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.setup import RunParts

MANY_STEPS = 10**6


def bench_config(arguments: Arguments, scheme: str, level: str, folder: str) -> Config:
    """A run's config with the numbers of `arguments`; its data files are never read."""
    prompts = max(arguments.prompts, 1)
    longest = max(arguments.response_length)
    return build_config(
        {
            "name": "bench",
            "model": {"path": folder},
            "data": {
                "train_files": ["random.parquet"],
                "train_batch_size": prompts,
                "max_prompt_length": arguments.prompt_length,
                "max_response_length": longest,
                "shuffle": False,
            },
            "rollout": {
                "n": arguments.n,
                "max_num_seqs": max(256, *arguments.batch),
                "cpu_kvcache_space_gib": kv_cache_gib(arguments, max(arguments.batch)),
                "gpu_memory_utilization": arguments.gpu_memory_utilization,
            },
            "quant": {"scheme": scheme, "align": level, "group_size": arguments.group_size},
            "actor": {
                "ppo_mini_batch_size": prompts // arguments.mini_batches,
                "ppo_micro_batch_size_per_gpu": arguments.micro_batch,
                "log_prob_micro_batch_size_per_gpu": arguments.micro_batch,
            },
            "optim": {"lr": 1e-6, "master_dtype": arguments.master_dtype},
            "trainer": {"total_training_steps": MANY_STEPS, "val_before_train": False, "test_freq": -1},
        }
    )


def kv_cache_gib(arguments: Arguments, sequences: int) -> float:
    """Room for all sequences at a time, and half as much again."""
    shape = arguments.source.shape()
    per_token = 2 * 2 * max(arguments.layers) * shape["num_key_value_heads"] * shape["head_dim"]
    tokens = sequences * (arguments.prompt_length + max(arguments.response_length) + 32)
    return max(0.125, 1.5 * per_token * tokens / 2**30)


def random_prompts(arguments: Arguments, vocab_size: int, count: int) -> list[list[int]]:
    """The same for every scheme and level."""
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(arguments.prompt_length)] for _ in range(count)]


def random_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """0 or 1 by the response's text: as good as any for random weights."""
    return float(zlib.crc32(solution_str.encode()) & 1)


def at_level(plain: Policy, level: str) -> Policy:
    """A policy at `level` on the parameters of `plain`, which is at `off`."""
    if level == "off":
        return plain
    shared = {id(parameter): parameter for parameter in plain.model.parameters()}
    return Policy(copy.deepcopy(plain.model, shared), plain.scheme, plain.ignore, align=level)


class BenchTrainer(LocalTrainer):
    """`plain`: the policy at `off`, measured or not; `policies`: level -> policy, all on the parameters of `plain`;
    `batch`: that of the last step."""

    timer: Meter

    def __init__(self, arguments: Arguments, scheme: str, folder: str) -> None:
        self.arguments = arguments
        self.plain = Policy.load(bench_config(arguments, scheme, "off", folder))
        self.policies = {level: at_level(self.plain, level) for level in arguments.levels_of(scheme)}
        self.level, policy = next(iter(self.policies.items()))
        tokenizer, hf_config = load_tokenizer(folder)
        token_ids = random_prompts(arguments, hf_config.vocab_size, arguments.prompts)
        prompts = [Prompt(i, "random", [], ids, "") for i, ids in enumerate(token_ids)]
        sampler = PromptSampler(len(prompts), len(prompts), seed=0, shuffle=False)
        parts = RunParts(policy, tokenizer, 0, PromptDataset(prompts), [], sampler, random_reward)
        super().__init__(bench_config(arguments, scheme, self.level, folder), parts)
        self.timer = Meter(Memory(self.policy.device), self.synchronize)
        self.batch: Batch | None = None

    def synchronize(self) -> None:
        """Wait for the GPU, where there is one."""
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize()

    def use(self, level: str) -> None:
        """Step at `level` from here on; its low-bit tensors are made, those of the level before are dropped."""
        if level != self.level:
            invalidate_quantized(self.policy.model)
            self.level, self.policy = level, self.policies[level]
        self.policy.requantize()

    def rollout(self, *, top_tokens: bool = False) -> tuple[Batch, dict[str, float]]:
        self.batch, metrics = super().rollout(top_tokens=top_tokens)
        return self.batch, metrics

    def generate(
        self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None = None
    ) -> RolloutBatch:
        return super().generate(prompts, dataclasses.replace(sampling, ignore_eos=True), seeds)

    def prefill(self) -> None:
        """The rollout of a step with one token a response: its prompts, and no decoding."""
        prompts = [prompt.prompt_token_ids for prompt in self.parts.train_prompts for _ in range(self.config.rollout.n)]
        self.engine.reset_prefix_cache()
        with self.timer.phase("prefill"):
            self.generate(prompts, SamplingConfig(1, self.config.rollout.temperature), list(range(len(prompts))))
        self.engine.reset_prefix_cache()

    def loss(
        self, batch: Batch, old_log_probs: torch.Tensor, rows: slice, responses: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        with self.timer.phase("forward"):
            return super().loss(batch, old_log_probs, rows, responses)

    def accumulate(self, loss: torch.Tensor) -> None:
        with self.timer.phase("backward"):
            super().accumulate(loss)

    def optimizer_step(self) -> float:
        with self.timer.phase("optimizer"):
            return super().optimizer_step()


class TrainerAlone(BenchTrainer):
    """Without an engine, on random responses that count as sampled by the trainer itself (delta is 0 then)."""

    def start_engine(self) -> RolloutEngine:
        return None  # type: ignore[return-value]  # no engine takes part, and nobody asks for one

    def random_batch(self, sequences: int, length: int) -> Batch:
        """At most so many of a step's sequences, their responses of `length`; `rollout_log_probs` are zero."""
        vocabulary = self.policy.model.config.vocab_size
        repeated = [prompt for prompt in self.parts.train_prompts for _ in range(self.config.rollout.n)]
        prompts = [prompt.prompt_token_ids for prompt in repeated[:sequences]]
        draw = random.Random(1)
        responses = [[draw.randrange(vocabulary) for _ in range(length)] for _ in prompts]
        zeros = [[0.0] * length for _ in prompts]
        rollout = RolloutBatch(prompts, responses, zeros, ["length"] * len(prompts), self.step)
        signs = torch.tensor([sign for sign, _ in zip(itertools.cycle((1.0, -1.0)), prompts, strict=False)])
        return make_batch(rollout, (signs + 1) / 2, signs, pad_token_id=0).to(self.policy.device)

    def trainer_step(self) -> dict[str, float]:
        """Old log-probs and update of a random batch."""
        self.batch = self.random_batch(self.arguments.sequences, self.config.data.max_response_length)
        with self.timer.phase("old_log_prob"):
            old_log_probs = self.old_log_probs(self.batch)
        self.batch.rollout_log_probs = old_log_probs
        with self.timer.phase("update"):
            metrics = self.update(self.batch, old_log_probs)
        self.step += 1
        return metrics
