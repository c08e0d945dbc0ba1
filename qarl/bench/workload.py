"""Build what a launch needs: the real local trainer and engine, a copy of a model, and random prompts."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from qarl.bench.steps import Arguments, Case
from qarl.checks.model_folder import load_tokenizer
from qarl.config import Config, build_config
from qarl.data.prompts import Prompt, PromptDataset, PromptSampler
from qarl.rollout.engine import RolloutBatch
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.setup import RunParts

MANY_STEPS = 10**6
PAD = 0


def config_of(arguments: Arguments, case: Case, folder: str) -> Config:
    """Return a run's config, with the sizes and counts that `arguments` gives. Its data files are never read."""
    scheme, level = case.scheme, case.level or ("off" if case.scheme == "bf16" else "linears")
    return build_config(
        {
            "name": "bench",
            "model": {"path": folder},
            "data": {
                "train_files": ["random.parquet"],
                "train_batch_size": arguments.prompts,
                "max_prompt_length": arguments.prompt_length,
                "max_response_length": max(arguments.response_length),
                "shuffle": False,
            },
            "rollout": {
                "n": arguments.n,
                "max_num_seqs": max(256, *arguments.batches),
                "cpu_kvcache_space_gib": kv_cache_gib(arguments),
                "gpu_memory_utilization": arguments.gpu_memory_utilization,
            },
            "quant": {"scheme": scheme, "align": level, "group_size": arguments.weight_group},
            "actor": {
                "ppo_mini_batch_size": arguments.prompts // arguments.mini_batches,
                "ppo_micro_batch_size_per_gpu": arguments.micro_batch_size,
                "log_prob_micro_batch_size_per_gpu": arguments.micro_batch_size,
            },
            "optim": {"lr": 1e-6},
            "trainer": {"total_training_steps": MANY_STEPS, "val_before_train": False, "test_freq": -1},
        }
    )


def kv_cache_gib(arguments: Arguments) -> float:
    """Return a size for the KV cache: 1.5 times the GiB for all sequences at once."""
    tokens = max(arguments.batches) * (arguments.prompt_length + max(arguments.response_length) + 32)
    return max(0.125, 1.5 * arguments.source.size.kv_bytes_per_token() * tokens / 2**30)


def random_tokens(vocabulary: int, rows: int, length: int, seed: int = 0) -> list[list[int]]:
    """Return random tokens, the same for every scheme and level."""
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(rows)]


def random_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """Return 0 or 1, depending on the response's text. With random weights any reward is arbitrary."""
    return float(zlib.crc32(solution_str.encode()) & 1)


def make_trainer(arguments: Arguments, case: Case, folder: str, *, engine: bool) -> LocalTrainer:
    """Build the local trainer. Without an engine, the trainer cannot sample."""
    config = config_of(arguments, case, folder)
    tokenizer, hf_config = load_tokenizer(folder)
    rows = random_tokens(hf_config.vocab_size, arguments.prompts, arguments.prompt_length)
    prompts = [Prompt(i, "random", [], ids, "") for i, ids in enumerate(rows)]
    sampler = PromptSampler(len(prompts), len(prompts), seed=0, shuffle=False)
    parts = RunParts(Policy.load(config), tokenizer, PAD, PromptDataset(prompts), [], sampler, random_reward)
    nobody: Any = object()
    return LocalTrainer(config, parts, None if engine else nobody)


def random_batch(trainer: LocalTrainer) -> Batch:
    """Return a step's sequences with random responses. `rollout_log_probs` are zero."""
    config = trainer.config
    prompts = [prompt.prompt_token_ids for prompt in trainer.parts.train_prompts for _ in range(config.rollout.n)]
    length = config.data.max_response_length
    responses = random_tokens(trainer.policy.model.config.vocab_size, len(prompts), length, seed=1)
    zeros = [[0.0] * length for _ in prompts]
    rollout = RolloutBatch(prompts, responses, zeros, ["length"] * len(prompts), trainer.step)
    signs = torch.tensor([sign for sign, _ in zip(itertools.cycle((1.0, -1.0)), prompts, strict=False)])
    return make_batch(rollout, (signs + 1) / 2, signs, pad_token_id=PAD).to(trainer.policy.device)


@torch.no_grad()
def move_weights(policy: Policy, seed: int) -> None:
    """Add noise of 1/16 of its RMS to every parameter, so that codes and scales change."""
    torch.manual_seed(seed)
    for parameter in policy.model.parameters():
        size = parameter.float().square().mean().sqrt().clamp(min=2.0**-6)
        parameter.add_(torch.randn_like(parameter) * (size / 16).to(parameter.dtype))
