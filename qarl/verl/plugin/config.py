"""Subclasses of verl's configuration dataclasses that add QaRL's keys. verl builds the class that `_target_` names.

verl's own dataclasses refuse unknown keys, so a config with QaRL's keys must set:

actor_rollout_ref.actor.policy_loss._target_=qarl.verl.plugin.config.TBPOPolicyLossConfig
actor_rollout_ref.actor.fsdp_config._target_=qarl.verl.plugin.config.QuantFSDPEngineConfig
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from omegaconf import OmegaConf
from pydantic import ValidationError, create_model
from verl.utils.device import get_device_name
from verl.workers.config import FSDPEngineConfig, PolicyLossConfig

from qarl.config import ActorConfig
from qarl.config.errors import from_pydantic, show
from qarl.config.objectives import LOSSES, RolloutCorrectionConfig
from qarl.config.types import Section
from qarl.errors import UserError
from qarl.objectives.settings import SAME_IN_VERL, Settings
from qarl.tbpo.config import KEYS, TBPOConfig
from qarl.verl.engine_keys import engine_fields

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


_LOSS_KEYS = {name: ActorConfig.model_fields[name] for name in (*KEYS, "mis_imp_ratio_cap")}
_LossKeys: Any = make_dataclass(
    "_LossKeys",
    [(name, type(key.default), key.default) for name, key in _LOSS_KEYS.items()],
    bases=(PolicyLossConfig,),
)


@dataclass
class TBPOPolicyLossConfig(_LossKeys):
    """verl's policy-loss keys, with QaRL's keys added.

    loss_mode     `tbpo`, or `qarl` for any other objective
    objective     QaRL's `actor.loss`, used if `loss_mode` is `qarl`
    correction    QaRL's section `rollout_correction`
    other keys    those of the section `actor` (docs/config_reference.md)

    verl's actor config already has `loss_agg_mode`, `clip_ratio_*`, `tau_*` and `loss_scale_factor`.
    """

    loss_mode: str = "tbpo"
    objective: str = "tbpo"
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


_QuantKeys: Any = create_model("_QuantKeys", __base__=Section, **engine_fields())


class QuantSettings(_QuantKeys):
    """The keys of QaRL's config that the actor needs (`qarl.verl.engine_keys`).

    `old_log_probs*` require `trainer.v1.trainer_mode=qarl_sync`. The engine's `hf_overrides` must have the same value
    of `head_dtype`."""


@dataclass
class QuantFSDPEngineConfig(FSDPEngineConfig):
    """verl's FSDP keys and `quant`. If `quant` is set, the actor's forward uses the rollout engine's tensors."""

    quant: Any = field(default_factory=QuantSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.quant, QuantSettings):
            object.__setattr__(self, "quant", quant_settings(self.quant))


def quant_settings(given: Mapping[str, Any]) -> QuantSettings:
    """Return `QuantSettings` from a mapping. Raise UserError for unknown keys and bad values."""
    where = "actor_rollout_ref.actor.fsdp_config.quant"
    values = {key: value for key, value in _plain(given).items() if key != "_target_"}
    if values.get("scheme") == "w4a8":
        raise UserError(
            "QaRL's actor for verl does not support w4a8",
            where=f"{where}.scheme",
            why="vLLM would compute W4A16. QaRL gives its own W4A8 kernel only to the engine of backend=local",
            fix="set it to w4a16 or w8a8, or run backend=local with quant.kernels=qarl",
        )
    return checked(QuantSettings, values, where)


def checked(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Return `kind(**values)`, a section of QaRL's config. Raise UserError that names the bad keys below `where`."""
    try:
        return kind(**values)
    except ValidationError as error:
        known = {name: key.description or "" for name, key in kind.model_fields.items()}
        problems = [from_pydantic(item, known, {}) for item in error.errors(include_url=False)]
        raise UserError(
            "; ".join(f"{problem.key}={show(problem.value)}: {problem.reason}" for problem in problems),
            where=", ".join(f"{where}.{problem.key}" for problem in problems),
            fix="; ".join(problem.fix for problem in problems),
        ) from None


def _plain(values: Any) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else dict(values)
    return dict(plain)


def tbpo_config(policy_loss: Any, loss_agg_mode: str) -> TBPOConfig:
    """Return TBPO's config from verl's `actor.policy_loss`. Missing keys get the paper's values.

    Raise UserError if a value is out of range or `loss_agg_mode` aggregates over tokens.
    """
    try:
        return TBPOConfig.of(policy_loss, loss_agg_mode=loss_agg_mode)
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
    policy_loss, where = actor.policy_loss, "actor_rollout_ref.actor"
    given = _plain(getattr(policy_loss, "correction", {}))
    correction = checked(RolloutCorrectionConfig, given, f"{where}.policy_loss.correction")
    if policy_loss.loss_mode == "tbpo" or policy_loss.objective == "tbpo":
        return Settings(correction=correction, tbpo=tbpo_config(policy_loss, loss_agg_mode))
    if loss_agg_mode == "seq-mean-token-sum-norm" and not actor.loss_scale_factor:
        raise UserError(
            "seq-mean-token-sum-norm needs the number that it divides by",
            where=f"{where}.loss_scale_factor",
            why="the loss sees only one micro-batch, whose width need not be that of the others",
            fix="set it to data.max_response_length, as +qarl=SCHEME does",
        )
    keys = {name: getattr(actor, name) for name in SAME_IN_VERL} | {
        "loss": policy_loss.objective,
        "loss_agg_mode": loss_agg_mode,
        "mis_imp_ratio_cap": policy_loss.mis_imp_ratio_cap,
        "loss_scale_factor": actor.loss_scale_factor or 1,
        "correction": correction,
    }
    settings: Settings = checked(Settings, keys, where)
    return settings


def check_engine_config(model_config: Any, engine_config: Any) -> None:
    """Raise UserError for verl settings that the quantized forward does not support."""
    if get_device_name() == "cuda":
        from qarl.checks.machine import check_this_gpu

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
