"""Builds QaRL's optimizers for the parameters of verl's actor."""

from __future__ import annotations

from typing import Any

import torch

from qarl.config.optimizers import Optimizer, built_by
from qarl.optim.muon import shard_axis


def chosen_optimizer(config: Any) -> Optimizer | None:
    """Return the optimizer that verl's keys under `actor_rollout_ref.actor.optim` name, or None for one of verl's."""
    module = getattr(config, "optimizer_impl", None)
    return built_by(f"{module}:{getattr(config, 'optimizer', None)}")


def build_optimizer(
    module: torch.nn.Module, config: Any, optimizer: Optimizer
) -> torch.optim.Optimizer:
    """Return `optimizer` for the parameters of an FSDP2 module. verl would pass them without their names, which decide
    which parameters Muon updates. verl's own code saves, loads and offloads the state.

    `config`: verl's FSDPOptimizerConfig, with the factory's other arguments in `override_optimizer_config`. Raise
    UserError if a parameter is sharded twice.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for _, parameter in named:
        shard_axis(parameter)  # raises for placements that the optimizer does not support
        if parameter.dtype != torch.float32:
            parameter.register_post_accumulate_grad_hook(_sum_in_fp32)
    built: torch.optim.Optimizer = optimizer.load()(
        named,
        lr=config.lr,
        betas=tuple(config.betas),
        weight_decay=config.weight_decay,
        **(config.override_optimizer_config or {}),
    )
    return built


@torch.no_grad()
def _sum_in_fp32(parameter: torch.Tensor) -> None:
    """Make FSDP2 add up the gradients of BF16 parameters in FP32, as the local backend does.

    FSDP2 rounds the gradient of each micro-batch to BF16 and would also add them up in BF16. Called after each
    micro-batch, this converts the first one's gradient to FP32, and FSDP2 adds the others to it in place."""
    if parameter.grad is not None and parameter.grad.dtype != torch.float32:
        total = parameter.grad.float()
        parameter.grad = None
        parameter.grad_dtype = (
            None  # allows another dtype; moving the model to a device resets this
        )
        parameter.grad = total
