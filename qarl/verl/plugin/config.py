"""Subclasses of verl's configuration dataclasses that add QaRL's keys. verl builds the class that `_target_` names.

verl's own dataclasses refuse unknown keys, so a config with QaRL's keys must set:

actor_rollout_ref.actor.policy_loss._target_=qarl.verl.plugin.config.TBPOPolicyLossConfig
actor_rollout_ref.actor.fsdp_config._target_=qarl.verl.plugin.config.QuantFSDPEngineConfig
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from verl.base_config import BaseConfig
from verl.utils.device import get_device_name
from verl.workers.config import FSDPEngineConfig, PolicyLossConfig

from qarl.config.objectives import LOSSES
from qarl.errors import UserError
from qarl.objectives.settings import Correction, Settings
from qarl.tbpo import TBPOConfig

_TBPO = TBPOConfig()
PRECISION_KEYS = {"param_dtype", "reduce_dtype", "buffer_dtype"}
"""The keys of `fsdp_config.mixed_precision` that QaRL's engine follows."""
_WRAPS = "replaces or wraps layers that QaRL computes as vLLM does"
_REASONS = {
    "strategy": "QaRL sends low-bit weights through hooks of FSDP2",
    "param_dtype": "the engine computes in BF16",
    "mixed_precision": "QaRL sets up FSDP2 itself and would ignore the other keys of mixed_precision",
    "offload_policy": "shards are quantized on the GPU",
    "_target_": "a reference model computes without quantization",
    "enable": "qat would quantize the weights a second time",
    "lora_rank": "QaRL trains and publishes whole weights, no adapters",
    "use_fused_kernels": "fused kernels replace the forward in which QaRL computes log-probs",
    "enable_activation_offload": f"activation offload {_WRAPS}",
    "use_liger": f"Liger {_WRAPS}",
}
"""Maps the last part of a verl key to the reason why QaRL's engine supports only one value of this key."""


@dataclass
class TBPOPolicyLossConfig(PolicyLossConfig):
    """verl's policy-loss keys, with QaRL's keys added.

    loss_mode     `tbpo`, or `qarl` for any other objective
    objective     QaRL's `actor.loss`, used if `loss_mode` is `qarl`
    correction    QaRL's section `rollout_correction`
    other keys    those of `qarl.tbpo.TBPOConfig`, which explains them

    verl's actor config already has `loss_agg_mode`, `clip_ratio_*`, `tau_*` and `loss_scale_factor`.
    """

    loss_mode: str = "tbpo"
    seq_clip_ratio_high: float = _TBPO.seq_clip_ratio_high
    seq_clip_ratio_low: float = _TBPO.seq_clip_ratio_low
    neg_seq_clip_ratio_low: float = _TBPO.neg_seq_clip_ratio_low
    neg_seq_clip_ratio_high: float = _TBPO.neg_seq_clip_ratio_high
    seq_tis_imp_ratio_cap: float = _TBPO.seq_tis_imp_ratio_cap
    mismatch_outside_cap: str = _TBPO.mismatch_outside_cap
    positive_band: str = _TBPO.positive_band
    band_scaling: str = _TBPO.band_scaling
    band_reference_length: int = _TBPO.band_reference_length
    objective: str = "tbpo"
    mis_imp_ratio_cap: float = 2.0
    correction: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise UserError if the objective is unknown, or if `loss_mode` would ignore it."""
        where = "actor_rollout_ref.actor.policy_loss"
        if self.objective not in LOSSES:
            raise UserError(
                f"there is no objective {self.objective!r}",
                where=f"{where}.objective",
                fix=f"choose one of {', '.join(LOSSES)}",
            )
        if self.loss_mode == "tbpo" and self.objective != "tbpo":
            raise UserError(
                f"objective={self.objective} would be ignored with loss_mode=tbpo",
                where=f"{where}.loss_mode",
                why="+qarl=SCHEME sets tbpo, and a +qarl_loss=NAME before it is overridden",
                fix=f"write +qarl_loss={self.objective} after +qarl=SCHEME, or set loss_mode=qarl",
            )


@dataclass
class QuantSettings(BaseConfig):
    """The keys of QaRL's config that the actor needs.

    router_replay, tensor_model_parallel_size, enforce_eager   keys of the section `rollout`
    publish_delta    `publish.delta`
    old_log_probs*   keys of the section `actor`; they require `trainer.v1.trainer_mode=qarl_sync`
    head_dtype       `model.head_dtype`; the engine's `hf_overrides` must have the same value
    other keys       keys of the section `quant`
    """

    scheme: str = "w4a16"
    group_size: int = 128
    ignore: list[str] = field(default_factory=lambda: ["lm_head"])
    align: str = "model"
    mismatch_limit: float | None = None
    router_replay: str = "auto"
    tensor_model_parallel_size: int = 1
    enforce_eager: bool = False
    publish_delta: str = "auto"
    head_dtype: str = "model"
    old_log_probs: str = "recompute"
    old_log_probs_sample: float = 0.125


@dataclass
class QuantFSDPEngineConfig(FSDPEngineConfig):
    """verl's FSDP keys and `quant`. If `quant` is set, the actor's forward uses the rollout engine's tensors."""

    quant: Any = field(default_factory=QuantSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.quant, QuantSettings):
            object.__setattr__(self, "quant", quant_settings(self.quant))


_CHOICES = {
    "publish_delta": ("auto", "off"),
    "head_dtype": ("model", "fp32"),
    "old_log_probs": ("recompute", "rollout", "auto"),
}
"""Settings that are names, with the names they may have."""


def quant_settings(given: Mapping[str, Any]) -> QuantSettings:
    """Return `QuantSettings` from a mapping. Raise UserError for unknown keys."""
    known = {one.name for one in fields(QuantSettings)} - {"_target_"}
    if unknown := sorted(set(given) - known - {"_target_"}):
        raise UserError(
            f"QaRL has no settings of quantization named {', '.join(unknown)}",
            where="actor_rollout_ref.actor.fsdp_config.quant",
            why="with a misspelt key, the intended setting would silently stay at its default",
            fix=f"correct or remove it; the keys are {', '.join(sorted(known))}",
        )
    values = {key: value for key, value in given.items() if key in known}
    if "ignore" in values:
        values["ignore"] = [values["ignore"]] if isinstance(values["ignore"], str) else list(values["ignore"])
    if values.get("scheme") == "w4a8":
        raise UserError(
            "QaRL's actor for verl does not support w4a8",
            where="actor_rollout_ref.actor.fsdp_config.quant.scheme",
            why="vLLM would compute W4A16. QaRL gives its own W4A8 kernel only to the engine of backend=local",
            fix="set it to w4a16 or w8a8, or run backend=local with quant.kernels=qarl",
        )
    for key, allowed in _CHOICES.items():
        if key in values and values[key] not in allowed:
            raise UserError(
                f"{key}={values[key]} is not known",
                where=f"actor_rollout_ref.actor.fsdp_config.quant.{key}",
                fix=f"set it to {' or '.join(allowed)}",
            )
    share = values.get("old_log_probs_sample", 0.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise UserError(
            f"old_log_probs_sample must be from 0 to 1, got {share!r}",
            where="actor_rollout_ref.actor.fsdp_config.quant.old_log_probs_sample",
            fix="set it to the share of the rows to check, for example 0.125",
        )
    return QuantSettings(**values)


def tbpo_config(policy_loss: Any, loss_agg_mode: str) -> TBPOConfig:
    """Return TBPO's config from verl's `actor.policy_loss`. Missing keys get the paper's values.

    Raise UserError if a value is out of range or `loss_agg_mode` aggregates over tokens.
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
            fix="set actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean, "
            "and give each band as a positive distance from 1",
        ) from error


def objective_settings(actor: Any, loss_agg_mode: str) -> Settings:
    """Return the settings of an objective from verl's actor config. Raise UserError as `tbpo_config` does, and if
    seq-mean-token-sum-norm has no `loss_scale_factor`."""
    policy_loss = actor.policy_loss
    correction = Correction(**dict(getattr(policy_loss, "correction", {})))
    if policy_loss.loss_mode == "tbpo":
        return Settings(correction=correction, tbpo=tbpo_config(policy_loss, loss_agg_mode))
    if loss_agg_mode == "seq-mean-token-sum-norm" and not actor.loss_scale_factor:
        raise UserError(
            "seq-mean-token-sum-norm needs the number that it divides by",
            where="actor_rollout_ref.actor.loss_scale_factor",
            why="the loss sees only one micro-batch, whose width need not be that of the others",
            fix="set it to data.max_response_length, as +qarl=SCHEME does",
        )
    return Settings(
        loss=policy_loss.objective,
        loss_agg_mode=loss_agg_mode,
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        tau_pos=actor.tau_pos,
        tau_neg=actor.tau_neg,
        mis_imp_ratio_cap=policy_loss.mis_imp_ratio_cap,
        loss_scale_factor=actor.loss_scale_factor or 1,
        correction=correction,
        tbpo=tbpo_config(policy_loss, loss_agg_mode) if policy_loss.objective == "tbpo" else TBPOConfig(),
    )


def check_engine_config(model_config: Any, engine_config: Any) -> None:
    """Raise UserError for verl settings that the quantized forward does not support."""
    if get_device_name() == "cuda":
        from qarl.checks.kernels import check_this_gpu

        check_this_gpu(engine_config.quant.scheme, "engine")
    where, reference = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config._target_"
    precision = engine_config.mixed_precision or {}
    param_dtype = precision.get("param_dtype", "bf16")
    unknown = set(precision) - PRECISION_KEYS
    problems = [
        (engine_config.strategy != "fsdp2", "actor_rollout_ref.actor.strategy", "fsdp2"),
        (str(param_dtype) not in ("bf16", "bfloat16"), f"{where}.mixed_precision.param_dtype", "bf16"),
        (bool(unknown), f"{where}.mixed_precision", f"only keys of {', '.join(sorted(PRECISION_KEYS))}"),
        (engine_config.offload_policy, f"{where}.offload_policy", "False (param_offload may be True)"),
        (engine_config.forward_only, reference, "verl.workers.config.FSDPEngineConfig"),
        (engine_config.qat.enable, f"{where}.qat.enable", "False (it is verl's own quantization)"),
        (model_config.lora_rank > 0, "actor_rollout_ref.model.lora_rank", "0"),
        (model_config.use_fused_kernels, "actor_rollout_ref.model.use_fused_kernels", "False"),
        (model_config.enable_activation_offload, "actor_rollout_ref.model.enable_activation_offload", "False"),
        (model_config.use_liger, "actor_rollout_ref.model.use_liger", "False"),
    ]
    wrong = [(key, value) for is_wrong, key, value in problems if is_wrong]
    if wrong:
        raise UserError(
            "QaRL's quantized actor does not support these verl settings",
            where=", ".join(key for key, _ in wrong),
            why="; ".join(_REASONS[key.rpartition(".")[2]] for key, _ in wrong),
            fix="set " + ", ".join(f"{key}={value}" for key, value in wrong),
        )


def refuse_shared_rows(engine_config: Any) -> None:
    """Raise UserError for Ulysses sequence parallelism. verl exchanges heads between ranks only in Flash Attention. So
    QaRL's attention functions (`qarl.align`) would see only one rank's part of each row."""
    ranks = engine_config.ulysses_sequence_parallel_size
    if ranks > 1:
        raise UserError(
            f"QaRL's attention does not support rows that are split over {ranks} ranks",
            where="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
            why="each rank would compute attention only within its own part of a row",
            fix="set actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
        )
