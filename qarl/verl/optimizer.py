"""The optimizer's keys in verl's config.

AdamW with FP32 masters is verl's default, `torch.optim.AdamW`. For Muon or BF16 masters, verl's engine uses
`qarl.optim.optimizer.MuonAdamW` (`qarl.verl.plugin.optimizer`).
"""

from __future__ import annotations

from typing import Any

from qarl.config import Config


def optim_keys(config: Config) -> dict[str, Any]:
    optim, root = config.optim, "actor_rollout_ref.actor.optim"
    equal = ("lr", "weight_decay", "lr_warmup_steps", "lr_scheduler_type", "min_lr_ratio")
    keys = {
        **{f"{root}.{name}": getattr(optim, name) for name in equal},
        f"{root}.betas": list(optim.betas),
        f"{root}.clip_grad": config.actor.grad_clip,
        f"{root}.override_optimizer_config": {"eps": optim.eps},
    }
    if optim.name == "adamw" and optim.master_dtype == "fp32":
        return keys
    muon = {"muon_lr": optim.muon_lr, "muon_momentum": optim.muon_momentum} if optim.name == "muon" else {}
    return keys | {
        f"{root}.optimizer_impl": "qarl.optim.optimizer",
        f"{root}.optimizer": "MuonAdamW",
        f"{root}.override_optimizer_config": {"eps": optim.eps, "seed": config.seed, **muon},
    }
