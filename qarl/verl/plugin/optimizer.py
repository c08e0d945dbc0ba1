"""QaRL's optimizer in verl's FSDP2 engine: Muon, and BF16 parameters with stochastic rounding.

verl's `build_optimizer` passes parameters to an optimizer without their names. But the names decide which parameters
Muon updates (`qarl.optim.muon.use_muon`). So if the config names QaRL's class, the engine calls `build_optimizer` of
this module. verl's own code saves, loads and offloads the state, which consists of DTensors and step numbers.

FSDP2 reduces the gradient of each micro-batch in FP32, and rounds it to BF16 if the parameter is BF16. It would also
add up the micro-batches in BF16. To prevent this, a hook converts the gradient of the first micro-batch to FP32, and
FSDP2 adds the others to it in place. The local backend rounds and adds in the same way.
"""

from __future__ import annotations

from typing import Any

import torch

from qarl.errors import UserError
from qarl.optim.muon import shard_axis
from qarl.optim.optimizer import MuonAdamW

KEYS = {"optimizer_impl": MuonAdamW.__module__, "optimizer": MuonAdamW.__name__}
"""Values of verl's keys under `actor_rollout_ref.actor.optim` that choose this optimizer."""


def is_ours(config: Any) -> bool:
    """Return whether verl's optimizer config names QaRL's optimizer."""
    return all(getattr(config, key, None) == value for key, value in KEYS.items())


def build_optimizer(module: torch.nn.Module, config: Any) -> MuonAdamW:
    """Return the optimizer for the parameters of an FSDP2 module.

    `config`: verl's FSDPOptimizerConfig, with MuonAdamW's other arguments in `override_optimizer_config`.

    Raises:
        UserError: `override_optimizer_config` has an argument that `MuonAdamW` lacks, or a parameter is sharded twice.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for _, parameter in named:
        shard_axis(parameter)  # raises for placements that the optimizer does not support
        if parameter.dtype != torch.float32:
            parameter.register_post_accumulate_grad_hook(_sum_in_fp32)
    settings = {"lr": config.lr, "betas": tuple(config.betas), "weight_decay": config.weight_decay}
    try:
        return MuonAdamW(named, **settings, **(config.override_optimizer_config or {}))
    except TypeError as error:
        raise UserError(
            "QaRL's optimizer does not have these arguments",
            where="actor_rollout_ref.actor.optim.override_optimizer_config",
            why=str(error),
            fix="use eps, muon_lr, muon_momentum and seed",
        ) from error


def muon_metrics(optimizer: Any) -> dict[str, float]:
    """Return Muon's current learning rate, in the unit of `qarl.optim.muon`, or {} if Muon is not used."""
    rates = [group["lr"] for group in optimizer.param_groups if group.get("use_muon")]
    return {"muon_lr": rates[0]} if rates else {}


@torch.no_grad()
def _sum_in_fp32(parameter: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.grad.dtype != torch.float32:
        total = parameter.grad.float()
        parameter.grad = None
        parameter.grad_dtype = None  # allows another dtype; moving the model to a device resets this
        parameter.grad = total
