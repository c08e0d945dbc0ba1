"""Subclasses of verl's configuration dataclasses that add QaRL's keys. verl builds the class that `_target_` names.

verl's own dataclasses refuse unknown keys, so a config with QaRL's keys must set:

actor_rollout_ref.actor.policy_loss._target_=qarl.verl.config_classes.QaRLPolicyLossConfig
actor_rollout_ref.actor.fsdp_config._target_=qarl.verl.config_classes.QuantFSDPEngineConfig
actor_rollout_ref.rollout.multi_turn._target_=qarl.verl.config_classes.QaRLMultiTurnConfig
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal, cast

from pydantic import ValidationError, create_model
from verl.workers.config import FSDPEngineConfig, MultiTurnConfig, PolicyLossConfig

from qarl.config import ActorConfig
from qarl.config import multi_turn as own
from qarl.config.actor import RolloutCorrectionConfig
from qarl.config.errors import from_pydantic, show
from qarl.config.objectives import objective_names
from qarl.config.types import Section
from qarl.errors import UserError
from qarl.objectives.settings import SAME_IN_VERL, Settings
from qarl.schemes import get_scheme
from qarl.tbpo.config import KEYS, TBPOConfig
from qarl.verl.config import fsdp_engine_fields
from qarl.verl.keys import ACTOR, MULTI_TURN, POLICY_LOSS, QUANT
from qarl.verl.refusals import Conflict, refuse

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
    other keys    those of the section `actor` (docs/lookup/config_reference.md)

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
        refuse(self._objective_conflicts())

    def _objective_conflicts(self) -> Iterator[Conflict]:
        key = f"{POLICY_LOSS}.objective"
        names = objective_names()
        if self.objective not in names:
            yield Conflict(key, self.objective, f"one of {', '.join(names)}", "it is unknown")
        if self.loss_mode == "tbpo" and self.objective != "tbpo":
            late = "it is ignored: +qarl=SCHEME sets tbpo, so write +qarl_loss=NAME after it"
            yield Conflict(key, self.objective, "tbpo, or loss_mode to qarl", late)


_QuantKeys: Any = create_model("_QuantKeys", __base__=Section, **fsdp_engine_fields())


class QuantSettings(_QuantKeys):
    """The keys of QaRL's config that the actor needs (`qarl.verl.config`), and a key of verl's own command line.

    `old_log_probs*` require `trainer.v1.trainer_mode=qarl_sync` or `qarl_separate_async`. The engine's `hf_overrides`
    must have the same value of `head_dtype`."""

    publish_delta: Literal["auto", "off"] = "auto"
    """`auto`: send separate rollout workers only the words that changed since the last publish. `off`: all tensors."""

    staleness: int = 0
    """QaRL's `trainer.staleness`. The actor keeps the versions that it needs (`qarl.verl.versions`)."""


@dataclass
class QuantFSDPEngineConfig(FSDPEngineConfig):
    """verl's FSDP keys and `quant`. If `quant` is set, the actor's forward uses the rollout engine's tensors."""

    quant: Any = field(default_factory=QuantSettings)

    def __post_init__(self) -> None:
        """Make `quant` a `QuantSettings`. Raise UserError for unknown keys and bad values."""
        super().__post_init__()
        if isinstance(self.quant, QuantSettings):
            return
        values = {key: value for key, value in _plain(self.quant).items() if key != "_target_"}
        settings = checked(QuantSettings, values, QUANT)
        refusal = get_scheme(settings.scheme).engine_refusal(settings.kernels)
        if refusal is not None:
            raise refusal
        object.__setattr__(self, "quant", settings)


@dataclass
class QaRLMultiTurnConfig(MultiTurnConfig):
    """verl's keys of several turns, and those of the agent loop `qarl_environment`.

    environment  QaRL's `rollout.environment`
    folder       where its processes work; null: where Ray starts them
    other keys   those of QaRL's section `multi_turn`. null is its default, but for the two that null switches off
    """

    environment: str | None = None
    max_turn_length: int | None = None
    timeout_s: float | None = 10.0
    workers: int = 2
    folder: str | None = None

    def __post_init__(self) -> None:
        """Raise UserError for bad values, if there is an environment."""
        if self.environment is not None:
            multi_turn_settings(self)


def multi_turn_settings(turns: Any) -> own.MultiTurnConfig:
    """Return QaRL's section `multi_turn` from verl's. Raise UserError for bad values."""
    values = {name: getattr(turns, name) for name in own.MultiTurnConfig.model_fields}
    given = {
        name: value
        for name, value in values.items()
        if value is not None
        or own.MultiTurnConfig.model_fields[name].default is None
        or name == "timeout_s"
    }
    return cast(own.MultiTurnConfig, checked(own.MultiTurnConfig, given, MULTI_TURN))


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


def as_dict(section: Any) -> dict[str, Any]:
    """Return a part of the config as a dict: {} if it is missing. vLLM also takes JSON in a string."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(section):
        section = OmegaConf.to_container(section, resolve=True)
    return dict(json.loads(section) if isinstance(section, str) else section or {})


def _plain(values: Any) -> dict[str, Any]:
    """Return `values` as a dict, without the keys that are null: they have QaRL's defaults."""
    return {key: value for key, value in as_dict(values).items() if value is not None}


def tbpo_config(policy_loss: Any, loss_agg_mode: str) -> TBPOConfig:
    """Return TBPO's config from verl's `actor.policy_loss`. Missing keys get the paper's values.

    Raise UserError if a value is out of range or `loss_agg_mode` aggregates over tokens.
    """
    try:
        return TBPOConfig.of(policy_loss, loss_agg_mode=loss_agg_mode)
    except ValueError as error:
        key = str(error).split()[0]
        where = f"{ACTOR if key == 'loss_agg_mode' else POLICY_LOSS}.{key}"
        what = "the configuration of loss_mode=tbpo is not valid"
        default = getattr(TBPOConfig(), key)
        raise UserError(
            what, where=where, why=str(error), fix=f"set, for example, {where}={default}"
        ) from error


def correction_of(policy_loss: Any) -> RolloutCorrectionConfig:
    """Return QaRL's section `rollout_correction` from verl's `actor.policy_loss`. Raise UserError if it is invalid."""
    given = _plain(getattr(policy_loss, "correction", {}))
    return cast(
        RolloutCorrectionConfig,
        checked(RolloutCorrectionConfig, given, f"{POLICY_LOSS}.correction"),
    )


def actor_settings(actor: Any, loss_agg_mode: str) -> Settings:
    """Return the settings of an objective from verl's actor config. Raise UserError as `tbpo_config` does, and if
    seq-mean-token-sum-norm has no `loss_scale_factor`."""
    policy_loss = actor.policy_loss
    correction = correction_of(policy_loss)
    if policy_loss.loss_mode == "tbpo" or policy_loss.objective == "tbpo":
        return Settings(correction=correction, tbpo=tbpo_config(policy_loss, loss_agg_mode))
    factor = actor.loss_scale_factor
    if loss_agg_mode == "seq-mean-token-sum-norm" and not factor:
        lacks_factor = Conflict(
            key=f"{ACTOR}.loss_scale_factor",
            value=factor,
            good="data.max_response_length, as +qarl=SCHEME does",
            why="seq-mean-token-sum-norm divides by it, and the loss sees only one micro-batch, whose width may differ",
        )
        raise lacks_factor.error()
    keys = {name: getattr(actor, name) for name in SAME_IN_VERL}
    keys |= {
        "loss": policy_loss.objective,
        "loss_agg_mode": loss_agg_mode,
        "correction": correction,
    }
    keys |= {"loss_scale_factor": factor or 1, "mis_imp_ratio_cap": policy_loss.mis_imp_ratio_cap}
    return cast(Settings, checked(Settings, keys, ACTOR))
