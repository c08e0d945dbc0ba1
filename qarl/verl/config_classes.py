"""Subclasses of verl's configuration dataclasses that add QaRL's keys. verl builds the class that `_target_` names.

verl's own dataclasses refuse unknown keys, so a config with QaRL's keys must set:

actor_rollout_ref.actor.policy_loss._target_=qarl.verl.config_classes.QaRLPolicyLossConfig
actor_rollout_ref.actor.fsdp_config._target_=qarl.verl.config_classes.QuantFSDPEngineConfig
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal, cast

from hydra.experimental.callback import Callback
from pydantic import ValidationError, create_model
from verl.utils.device import get_device_name
from verl.workers.config import FSDPEngineConfig, PolicyLossConfig

from qarl.config import ActorConfig
from qarl.config.actor import RolloutCorrectionConfig
from qarl.config.errors import from_pydantic, show
from qarl.config.objectives import objective_names
from qarl.config.types import Section
from qarl.errors import UserError
from qarl.objectives.settings import SAME_IN_VERL, Settings
from qarl.rollout.vllm_plugin import experts_of
from qarl.tbpo.config import KEYS, TBPOConfig
from qarl.verl.checks import as_dict, check_composed
from qarl.verl.config import fsdp_engine_fields
from qarl.verl.refusals import Problem, attempt, errors_of, raise_all, refuse

_LOSS_KEYS = {name: ActorConfig.model_fields[name] for name in (*KEYS, "mis_imp_ratio_cap")}
_LossKeys: Any = make_dataclass(
    "_LossKeys",
    [(name, type(key.default), key.default) for name, key in _LOSS_KEYS.items()],
    bases=(PolicyLossConfig,),
)


@dataclass
class QaRLPolicyLossConfig(_LossKeys):
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
        """Replace null by the defaults. Raise UserError if the objective is unknown, or `loss_mode` would ignore it."""
        for name, info in _LOSS_KEYS.items():
            if getattr(self, name) is None:  # verl's dataclasses refuse a second assignment
                object.__setattr__(self, name, info.default)
        names = objective_names()
        known = self.objective in names
        ignored = self.loss_mode == "tbpo" and self.objective != "tbpo"
        key = ("actor_rollout_ref.actor.policy_loss.objective", self.objective)
        late = "it is ignored: +qarl=SCHEME sets tbpo, so write +qarl_loss=NAME after it"
        unknown = (not known, *key, f"one of {', '.join(names)}", "it is unknown")
        refuse([unknown, (ignored, *key, "tbpo, or loss_mode to qarl", late)])


_QuantKeys: Any = create_model("_QuantKeys", __base__=Section, **fsdp_engine_fields())


class QuantSettings(_QuantKeys):
    """The keys of QaRL's config that the actor needs (`qarl.verl.config`), and a key of verl's own command line.

    `old_log_probs*` require `trainer.v1.trainer_mode=qarl_sync`. The engine's `hf_overrides` must have the same value
    of `head_dtype`."""

    publish_delta: Literal["auto", "off"] = "auto"
    """`auto`: send separate rollout workers only the words that changed since the last publish. `off`: all tensors."""


@dataclass
class QuantFSDPEngineConfig(FSDPEngineConfig):
    """verl's FSDP keys and `quant`. If `quant` is set, the actor's forward uses the rollout engine's tensors."""

    quant: Any = field(default_factory=QuantSettings)

    def __post_init__(self) -> None:
        """Make `quant` a `QuantSettings`. Raise UserError for unknown keys and bad values."""
        super().__post_init__()
        where = "actor_rollout_ref.actor.fsdp_config.quant"
        if isinstance(self.quant, QuantSettings):
            return
        values = {key: value for key, value in _plain(self.quant).items() if key != "_target_"}
        if values.get("scheme") == "w4a8":
            raise UserError(
                "QaRL's actor for verl does not support w4a8",
                where=f"{where}.scheme",
                why="vLLM would compute W4A16. QaRL gives its own W4A8 kernel only to the engine of backend=local",
                fix="set it to w4a16 or w8a8, or run backend=local with quant.kernels=qarl",
            )
        object.__setattr__(self, "quant", checked(QuantSettings, values, where))


def checked(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Return `kind(**values)`, a section of QaRL's config. Raise UserError that names the bad keys below `where`."""
    try:
        return kind(**values)
    except ValidationError as error:
        known = {name: key.description or "" for name, key in kind.model_fields.items()}
        problems = [from_pydantic(item, known) for item in error.errors(include_url=False)]
        raise UserError(
            "; ".join(
                f"{problem.key}={show(problem.value)}: {problem.reason}" for problem in problems
            ),
            where=", ".join(f"{where}.{problem.key}" for problem in problems),
            fix="; ".join(problem.fix for problem in problems),
        ) from None


def _plain(values: Any) -> dict[str, Any]:
    """Return `values` as a dict, without the keys that are null: they have QaRL's defaults."""
    return {key: value for key, value in as_dict(values).items() if value is not None}


def tbpo_config(policy_loss: Any, loss_agg_mode: str) -> TBPOConfig:
    """Return TBPO's config from verl's `actor.policy_loss`. Missing keys get the paper's values.

    Raise UserError if a value is out of range or `loss_agg_mode` aggregates over tokens.
    """
    actor = "actor_rollout_ref.actor"
    try:
        return TBPOConfig.of(policy_loss, loss_agg_mode=loss_agg_mode)
    except ValueError as error:
        key = str(error).split()[0]
        where = f"{actor}.{key}" if key == "loss_agg_mode" else f"{actor}.policy_loss.{key}"
        what = "the configuration of loss_mode=tbpo is not valid"
        default = getattr(TBPOConfig(), key)
        raise UserError(
            what, where=where, why=str(error), fix=f"set, for example, {where}={default}"
        ) from error


def actor_settings(actor: Any, loss_agg_mode: str) -> Settings:
    """Return the settings of an objective from verl's actor config. Raise UserError as `tbpo_config` does, and if
    seq-mean-token-sum-norm has no `loss_scale_factor`."""
    policy_loss = actor.policy_loss
    where = "actor_rollout_ref.actor"
    correction = _plain(getattr(policy_loss, "correction", {}))
    correction = checked(RolloutCorrectionConfig, correction, f"{where}.policy_loss.correction")
    if policy_loss.loss_mode == "tbpo" or policy_loss.objective == "tbpo":
        return Settings(correction=correction, tbpo=tbpo_config(policy_loss, loss_agg_mode))
    factor = actor.loss_scale_factor
    lacks = loss_agg_mode == "seq-mean-token-sum-norm" and not factor
    why = "seq-mean-token-sum-norm divides by it, and the loss sees only one micro-batch, whose width may differ"
    refuse(
        [
            (
                lacks,
                f"{where}.loss_scale_factor",
                factor,
                "data.max_response_length, as +qarl=SCHEME does",
                why,
            )
        ]
    )
    keys = {name: getattr(actor, name) for name in SAME_IN_VERL}
    keys |= {
        "loss": policy_loss.objective,
        "loss_agg_mode": loss_agg_mode,
        "correction": correction,
    }
    keys |= {"loss_scale_factor": factor or 1, "mis_imp_ratio_cap": policy_loss.mis_imp_ratio_cap}
    return cast(Settings, checked(Settings, keys, where))


def check_engine_config(model: Any, engine: Any) -> None:
    """Raise UserError that says all of `engine_errors`."""
    raise_all(engine_errors(model, engine))


def engine_errors(model: Any, engine: Any) -> list[UserError]:
    """Return an error for each of verl's settings that QaRL's forward does not support.

    `engine`: the actor's `fsdp_config`. If it is not quantized, only attention is QaRL's."""
    errors: list[UserError] = []
    where = "actor_rollout_ref.actor"
    shards = "actor_rollout_ref.actor.fsdp_config"
    precision = engine.mixed_precision or {}
    ranks = engine.ulysses_sequence_parallel_size
    known = {"param_dtype", "reduce_dtype", "buffer_dtype"}  # the keys that QaRL's engine follows
    # verl exchanges heads between ranks only in Flash Attention.
    rows = "each rank would compute attention only within its own part of a row"
    hooks = "low-bit weights are sent through hooks of FSDP2, and FSDP1 does not run without GPUs"
    problems: list[Problem] = [
        (ranks > 1, f"{where}.ulysses_sequence_parallel_size", ranks, 1, rows),
        (engine.strategy != "fsdp2", f"{where}.strategy", engine.strategy, "fsdp2", hooks),
        (
            set(precision) - known,
            f"{shards}.mixed_precision",
            precision,
            f"keys of {known}",
            "others would be ignored",
        ),
    ]
    if isinstance(engine, QuantFSDPEngineConfig):
        if get_device_name() == "cuda":
            from qarl.checks.machine import check_this_gpu

            attempt(lambda: check_this_gpu(engine.quant.scheme, "engine"), errors)
        reference = "actor_rollout_ref.ref.fsdp_config._target_"
        lora = model.lora_rank
        stored = str(engine.model_dtype or "fp32")
        adapts = engine.quant.lora.r
        dtype = str(precision.get("param_dtype", "bf16"))
        plain = "verl.workers.config.FSDPEngineConfig"
        other = dtype not in ("bf16", "bfloat16")
        verls = "verl's adapters are peft's modules, which do not compute as vLLM does"
        wraps = "it replaces or wraps layers that QaRL computes as vLLM does"
        experts = bool(experts_of(getattr(model, "hf_config", None)))
        fp8_experts = (
            adapts and experts and engine.quant.scheme == "fp8" and get_device_name() == "cuda"
        )
        two_kernels = "beside adapters vLLM multiplies FP8 experts by Triton on a GPU, and the actor by CUTLASS"
        problems += [
            (other, f"{shards}.mixed_precision.param_dtype", dtype, "bf16", "vLLM uses BF16"),
            (
                engine.offload_policy,
                f"{shards}.offload_policy",
                True,
                False,
                "shards are quantized on the GPU",
            ),
            (engine.forward_only, reference, "it", plain, "a reference is not quantized"),
            (
                engine.qat.enable,
                f"{shards}.qat.enable",
                True,
                False,
                "qat would quantize the weights a second time",
            ),
            (
                lora > 0,
                "actor_rollout_ref.model.lora_rank",
                lora,
                "0, and QaRL's lora.r to the rank",
                verls,
            ),
            (fp8_experts, f"{shards}.quant.scheme", "fp8", "w4a16", two_kernels),
            (
                adapts and stored != "bf16",
                f"{shards}.model_dtype",
                stored,
                "bf16",
                "the base is frozen",
            ),
        ]
        for name in ("use_fused_kernels", "enable_activation_offload", "use_liger"):
            problems.append(
                (getattr(model, name), f"actor_rollout_ref.model.{name}", True, False, wraps)
            )
    return [*errors, *errors_of(problems)]


class CheckBeforeRay(Callback):
    """Ends verl's own command with one message and exit code 2, before Ray starts, if its config is refused."""

    def on_job_start(self, config: Any, **more: Any) -> None:
        try:
            check_composed(config)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None  # Hydra turns an Exception of a callback into a warning
