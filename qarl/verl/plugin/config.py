"""Subclasses of verl's configuration dataclasses, which admit no unknown keys: verl builds whatever `_target_` names.

actor_rollout_ref.actor.policy_loss._target_=qarl.verl.plugin.config.TBPOPolicyLossConfig
actor_rollout_ref.actor.fsdp_config._target_=qarl.verl.plugin.config.QuantFSDPEngineConfig
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from verl.base_config import BaseConfig
from verl.workers.config import FSDPEngineConfig, PolicyLossConfig

from qarl.errors import UserError
from qarl.tbpo import TBPOConfig

_TBPO = TBPOConfig()


@dataclass
class TBPOPolicyLossConfig(PolicyLossConfig):
    """verl's policy-loss keys, `loss_mode` being `tbpo`, and those of `qarl.tbpo.TBPOConfig`, where they are explained.

    `loss_agg_mode` is the actor's own key, as for every other loss.
    """

    loss_mode: str = "tbpo"
    seq_clip_ratio_high: float = _TBPO.seq_clip_ratio_high
    seq_clip_ratio_low: float = _TBPO.seq_clip_ratio_low
    neg_seq_clip_ratio_low: float = _TBPO.neg_seq_clip_ratio_low
    neg_seq_clip_ratio_high: float = _TBPO.neg_seq_clip_ratio_high
    seq_tis_imp_ratio_cap: float = _TBPO.seq_tis_imp_ratio_cap
    mismatch_outside_cap: str = _TBPO.mismatch_outside_cap
    positive_band: str = _TBPO.positive_band


@dataclass
class QuantSettings(BaseConfig):
    """`scheme`, `group_size`, `ignore`, `align`, `mismatch_limit`: as in the section `quant` of `qarl.config`;
    `router_replay`: as in its section `rollout`."""

    scheme: str = "w4a16"
    group_size: int = 128
    ignore: list[str] = field(default_factory=lambda: ["lm_head"])
    align: str = "model"
    mismatch_limit: float | None = None
    router_replay: str = "auto"


@dataclass
class QuantFSDPEngineConfig(FSDPEngineConfig):
    """verl's FSDP keys, and `quant`: with it the actor's forward multiplies by what the rollout engine is given."""

    quant: Any = field(default_factory=QuantSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.quant, QuantSettings):
            object.__setattr__(self, "quant", quant_settings(self.quant))


def quant_settings(given: Mapping[str, Any]) -> QuantSettings:
    """`QuantSettings` from a mapping. UserError for keys it does not have."""
    known = {one.name for one in fields(QuantSettings)} - {"_target_"}
    if unknown := sorted(set(given) - known - {"_target_"}):
        raise UserError(
            f"unknown keys: {', '.join(unknown)}",
            where="actor_rollout_ref.actor.fsdp_config.quant",
            fix=f"use {', '.join(sorted(known))}",
        )
    values = {key: value for key, value in given.items() if key in known}
    if "ignore" in values:
        values["ignore"] = [values["ignore"]] if isinstance(values["ignore"], str) else list(values["ignore"])
    return QuantSettings(**values)


def tbpo_config(policy_loss: Any, loss_agg_mode: str) -> TBPOConfig:
    """The loss's own config from verl's `actor.policy_loss`: the paper's values if that is verl's plain dataclass.

    Raises:
        UserError: a value out of range, or an aggregation over tokens.
    """
    names = {one.name for one in fields(TBPOConfig)} - {"loss_agg_mode"}
    given = {name: getattr(policy_loss, name) for name in names if hasattr(policy_loss, name)}
    try:
        return TBPOConfig(**given, loss_agg_mode=loss_agg_mode)
    except ValueError as error:
        raise UserError(
            "the configuration of loss_mode=tbpo is not valid",
            where="actor_rollout_ref.actor.policy_loss, actor_rollout_ref.actor.loss_agg_mode",
            why=str(error),
            fix="set actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean, and the bands as positive distances",
        ) from error
