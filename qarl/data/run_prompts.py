"""Load the prompts that a config names, and choose their order."""

from __future__ import annotations

import sys
from typing import Any

from qarl.config import Config
from qarl.data.prompts import PromptDataset, PromptSampler, check_disjoint, load_prompts


def load_train_prompts(config: Config, tokenizer: Any) -> PromptDataset:
    return load_prompts(config.data.train_files, **prompt_options(config, tokenizer))


def load_val_prompts(config: Config, tokenizer: Any) -> PromptDataset | list[Any]:
    """Load the held-out prompts, or return [] if the run never evaluates.

    backend=verl always loads them, because verl always reads their files.
    """
    files, limit = config.data.val_files, config.trainer.val_max_prompts
    if config.backend == "verl":
        return load_prompts(files, **prompt_options(config, tokenizer)) if files else []
    if not (config.trainer.val_before_train or config.trainer.test_freq > 0):
        return []
    return load_prompts(files, limit=limit, **prompt_options(config, tokenizer))


def prompt_options(config: Config, tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of `load_prompts` that training and evaluation share."""
    return {
        "tokenizer": tokenizer,
        "prompt_key": config.data.prompt_key,
        "max_prompt_length": config.data.max_prompt_length,
        "filter_overlong_prompts": config.data.filter_overlong_prompts,
    }


def prompt_sampler(config: Config, prompts: PromptDataset) -> PromptSampler:
    return PromptSampler(len(prompts), config.data.train_batch_size, seed=config.seed, shuffle=config.data.shuffle)


def report_data(train_prompts: PromptDataset, val_prompts: PromptDataset | list[Any]) -> None:
    """Print on stderr how many prompts were filtered out, and how many held-out prompts are in the training data."""
    if train_prompts.num_filtered:
        left_out = f"{train_prompts.num_filtered} training prompts over data.max_prompt_length are left out"
        print(f"note: {left_out}", file=sys.stderr)
    shared = check_disjoint(train_prompts, val_prompts)
    if shared:
        print(f"warning: {shared} of the held-out prompts are also in the training data", file=sys.stderr)
