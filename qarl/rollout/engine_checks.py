"""What is asked of vLLM before and after it starts in this process: whether QaRL's plugin is loaded, and whether the
engine runs the operators that the trainer follows."""

from __future__ import annotations

from typing import Any

import torch

from qarl.kernels.registry import least_rows
from qarl.rollout import vllm_plugin
from qarl.rollout.engine_config import EngineConfig, eager
from qarl.rollout.kernel_request import kernel_request


def check_plugin(config: EngineConfig, hf_config: Any) -> None:
    """Raise UserError if an engine of `config` needs a part of the plugin that is not registered, or cannot start.

    `hf_config`: the model's transformers config."""
    own_experts = config.aligned or not config.kernels.by_engine
    vllm_plugin.check_loaded(hf_config, own_experts=own_experts)
    vllm_plugin.check_linears_loaded(config.kernels)
    if _follows_on_gpu(config):
        vllm_plugin.check_operators_loaded()
    if not torch.cuda.is_available():
        vllm_plugin.check_eager(hf_config, eager(config.enforce_eager))


def check_operators(config: EngineConfig, model: torch.nn.Module) -> None:
    """Raise UserError if the engine's `model` runs other kernels than `quant.kernels`, or other operators than the
    trainer follows at level `model` on a GPU."""
    if not config.kernels.by_engine:
        from qarl.rollout.vllm_plugin import own_linears

        own_linears.check_in_use(model, kernel_request(config.kernels, config.scheme.name))
    if _follows_on_gpu(config):
        from qarl.rollout.vllm_plugin import cuda_linears, cuda_operators

        cuda_operators.check_operators()
        if least_rows(config.kernels, config.scheme.operands) > 1:
            cuda_linears.check_rows(model)


def _follows_on_gpu(config: EngineConfig) -> bool:
    return config.aligned and torch.cuda.is_available()
