"""The list of all checks of a run that need no weights. The cheapest checks come first.

Both backends make these checks before a run starts (`check_run`). The doctor makes them after its own report.

The tokenizer, the prompts and the reward function are loaded when a check first needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

from qarl.align.families import check_rows
from qarl.checks.driver import check_compiler, check_driver
from qarl.checks.head import check_head
from qarl.checks.kernels import check_dense, check_int8_experts, check_kernels
from qarl.checks.layers import check_linears
from qarl.checks.lengths import check_kv_cache, check_length
from qarl.checks.machine import check_cpu, check_engine_device, check_engine_installed
from qarl.checks.model import (
    applied_level,
    check_model,
    check_not_quantized,
    report_level,
    unconfirmed_level,
)
from qarl.checks.model_folder import load_tokenizer
from qarl.checks.sampling import check_sampling
from qarl.checks.stops import check_stops
from qarl.checks.tensor_parallel import check_tensor_parallel
from qarl.checks.verl_plugin import check_no_new_trl, check_plugin_installed, refuse_hidden_code
from qarl.checks.weight_files import check_tied, check_weight_files
from qarl.config import Config
from qarl.data.prompts import PromptDataset, PromptSampler, check_vocabulary
from qarl.data.rewards import RewardFn, check_reward_fn, get_reward_fn
from qarl.data.run_prompts import load_train_prompts, load_val_prompts, prompt_sampler, report_data
from qarl.metrics.tracker import check_loggers
from qarl.process import runs_on_cpu
from qarl.rollout import vllm_plugin
from qarl.rollout.gpu_sharing import check_not_batch_invariant, eager


class RunInputs:
    """The inputs of a run, except the weights. A property raises `UserError` if its input is unusable."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @cached_property
    def _tokenizer_and_config(self) -> tuple[Any, Any]:
        return load_tokenizer(self.config.model.path, self.config.model.trust_remote_code)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer_and_config[0]

    @property
    def hf_config(self) -> Any:
        return self._tokenizer_and_config[1]

    @cached_property
    def train_prompts(self) -> PromptDataset:
        return load_train_prompts(self.config, self.tokenizer)

    @cached_property
    def val_prompts(self) -> PromptDataset | list[Any]:
        return load_val_prompts(self.config, self.tokenizer)

    @cached_property
    def sampler(self) -> PromptSampler:
        return prompt_sampler(self.config, self.train_prompts)

    @cached_property
    def reward_fn(self) -> RewardFn:
        return get_reward_fn(self.config.reward.function)

    @cached_property
    def stop_warnings(self) -> list[str]:
        return check_stops(self.config.model.path, self.tokenizer, self.hf_config)


class Check(NamedTuple):
    """One check. `make` raises `UserError` if the run would fail. An empty `backend` means both backends."""

    name: str
    make: Callable[[RunInputs], object]
    backend: str = ""


CHECKS = (
    Check("loggers", lambda run: check_loggers(run.config.trainer.logger)),
    Check("NVIDIA driver", lambda run: check_driver()),
    Check("compiler", lambda run: check_compiler()),
    Check("engine installed", lambda run: check_engine_installed()),
    Check("engine's device", lambda run: check_engine_device(run.config)),
    Check("plugin installed", lambda run: check_plugin_installed(), "verl"),
    Check("no new TRL", lambda run: check_no_new_trl(), "verl"),
    Check("CPU", lambda run: check_cpu(run.config)),
    Check("batch invariance", lambda run: check_not_batch_invariant(), "local"),
    Check("kernels", lambda run: check_kernels(run.config)),
    Check("config and tokenizer", lambda run: run.tokenizer),
    Check("not quantized", lambda run: check_not_quantized(run.config, run.hf_config)),
    Check("model", lambda run: check_model(run.hf_config)),
    Check("lm_head", lambda run: check_head(run.config, run.hf_config)),
    Check("rows", lambda run: check_rows(run.hf_config, packed=run.config.model.use_remove_padding)),
    Check("experts", lambda run: _check_experts(run)),
    Check("kernels of experts", lambda run: check_dense(run.config, run.hf_config)),
    Check("vocabulary", lambda run: _check_vocabulary(run)),
    Check("hidden code", lambda run: refuse_hidden_code(run.config, run.tokenizer, run.hf_config), "verl"),
    Check("ends of responses", lambda run: run.stop_warnings),
    Check("length", lambda run: check_length(run.config, run.hf_config)),
    Check("KV cache", lambda run: check_kv_cache(run.config, run.hf_config)),
    Check("linears", lambda run: check_linears(run.config, run.hf_config)),
    Check("tensor parallelism", lambda run: check_tensor_parallel(run.config, run.hf_config), "verl"),
    Check("sampling", lambda run: _check_sampling(run)),
    Check("reward function", lambda run: run.reward_fn),
    Check("training prompts", lambda run: run.sampler),
    Check("evaluation prompts", lambda run: run.val_prompts),
    Check("reward of a row", lambda run: _check_reward(run)),
    Check("weight files", lambda run: check_weight_files(run.config.model.path)),
    Check("tied weights", lambda run: _check_tied(run)),
)
"""All checks, in the order in which they are made."""

MODEL_CHECKS = ("not quantized", "model", "lm_head", "rows", "length", "linears", "vocabulary")
"""Names of the checks that read only the config and the model's folder, so that they hold on any machine."""


def checks_for(backend: str) -> list[Check]:
    return [check for check in CHECKS if check.backend in ("", backend)]


def check_run(config: Config) -> RunInputs:
    """Make all checks of `config.backend`, print warnings to stderr, and return the loaded inputs. Raise the UserError
    of the first check that fails."""
    run = RunInputs(config)
    for check in checks_for(config.backend):
        check.make(run)
    report_level(config, run.hf_config)
    for warning in run.stop_warnings:
        print(f"warning: {warning}", file=sys.stderr)
    report_data(run.train_prompts, run.val_prompts)
    return run


def check_run_model(config: Config) -> None:
    """Make those checks of a run that read only the model's folder. Raise the UserError of the first that fails."""
    run = RunInputs(config)
    for check in checks_for(config.backend):
        if check.name in MODEL_CHECKS:
            check.make(run)


def _check_experts(run: RunInputs) -> None:
    if not runs_on_cpu(run.config.backend):
        check_int8_experts(run.config, run.hf_config)
    else:
        vllm_plugin.check_installed(run.hf_config)
        if run.config.backend == "local":  # `verl_keys` makes verl's engines eager on a CPU
            vllm_plugin.check_eager(run.hf_config, eager(run.config.rollout.enforce_eager))


def _check_tied(run: RunInputs) -> None:
    model = run.config.model
    check_tied(model.path, run.hf_config, trust_remote_code=model.trust_remote_code)


def _check_vocabulary(run: RunInputs) -> None:
    check_vocabulary(run.tokenizer, run.hf_config.vocab_size, max_unused=run.hf_config.vocab_size // 100)


def _check_sampling(run: RunInputs) -> None:
    level, _ = applied_level(run.config, run.hf_config)
    confirmed = unconfirmed_level(run.config, run.hf_config) is None
    check_sampling(run.config, level=level, vocabulary=run.hf_config.vocab_size, confirmed=confirmed)


def _check_reward(run: RunInputs) -> None:
    check_reward_fn(run.reward_fn, run.train_prompts, timeout_s=run.config.reward.timeout_s)
