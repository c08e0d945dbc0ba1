"""Checks of verl's whole config that are made before Ray starts.

verl builds the actor's and the engine's settings in different processes, each from its own section, so a contradiction
between them shows only after minutes, if at all. `check_composed` compares the sections. QaRL's config calls it. On
verl's own command line the groups +qarl=SCHEME name `CheckBeforeRay` as a callback of Hydra's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from qarl.errors import UserError
from qarl.quant.scheme import get_scheme
from qarl.verl.plugin.config import QuantSettings, check_engine_config, refuse_shared_rows
from qarl.verl.plugin.loss import OURS

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
QUANT = f"{ACTOR}.fsdp_config.quant"
OVERRIDES = f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides"
RECEIVER = f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls"


class CheckBeforeRay(Callback):
    """Ends verl's command with one message and exit code 2 if `check_composed` refuses its config."""

    def on_job_start(self, config: DictConfig, **more: Any) -> None:
        try:
            check_composed(config)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None  # Hydra turns an Exception of a callback into a warning


def check_composed(composed: Any) -> None:
    """Raise UserError if verl's config `composed` has parts that contradict each other or that QaRL does not support.
    Nothing but rollout log-probs is checked without a quantized actor."""
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(composed.actor_rollout_ref.actor)
    quant = getattr(actor.engine, "quant", None)
    refuse_missing_log_probs(composed, quant)
    refuse_corrections(composed)
    if quant is not None:
        check_engine_config(composed.actor_rollout_ref.model, actor.engine)
        refuse_shared_rows(actor.engine)
        refuse_other_engine(composed, quant)
        refuse_unused_source(composed, quant)


def refuse_missing_log_probs(composed: Any, quant: QuantSettings | None) -> None:
    """Raise UserError if the rollout would not return the log-probs that the loss or the old log-probs are made of."""
    mode = composed.actor_rollout_ref.actor.policy_loss.loss_mode
    source = "recompute" if quant is None else quant.old_log_probs
    if (mode in OURS or source != "recompute") and not composed.actor_rollout_ref.rollout.calculate_log_probs:
        reader = f"{ACTOR}.policy_loss.loss_mode={mode}" if mode in OURS else f"{QUANT}.old_log_probs={source}"
        raise UserError(
            f"{ROLLOUT}.calculate_log_probs=False, but {reader} needs the rollout's log-probs",
            where=f"{ROLLOUT}.calculate_log_probs",
            why="the mismatch is the difference between the trainer's and the rollout's log-probs",
            fix="set it to True",
        )


def refuse_corrections(composed: Any) -> None:
    """Raise UserError if verl would apply its own rollout correction besides TBPO's, or hide the mismatch from TBPO."""
    if composed.actor_rollout_ref.actor.policy_loss.loss_mode != "tbpo":
        return
    correction = composed.algorithm.rollout_correction
    for key, neutral, why in (
        ("bypass_mode", False, "it replaces the trainer's log-probs by the rollout's, so TBPO would see no mismatch"),
        ("rollout_is", None, "it adds a weight for each token, but TBPO already weights the whole sequence"),
        ("rollout_rs", None, "it removes tokens before TBPO forms a response's ratio and the mismatch is measured"),
    ):
        if value := correction.get(key):
            raise UserError(
                f"rollout_correction.{key}={value} cannot be used with TBPO",
                where=f"algorithm.rollout_correction.{key}",
                why=why,
                fix=f"set it to {'null' if neutral is None else 'false'}, or choose a different loss_mode",
            )


def refuse_other_engine(composed: Any, quant: QuantSettings) -> None:
    """Raise UserError if the settings of vLLM are not those that the actor (`quant`) computes with."""
    overrides = _mapping(OmegaConf.select(composed, OVERRIDES))
    scheme = get_scheme(quant.scheme, group_size=quant.group_size)
    wanted = scheme.quantization_config(quant.ignore) if scheme.quantized else {}
    actors, engines = (_described(found) for found in (wanted, _mapping(overrides.get("quantization_config"))))
    if actors != engines:
        differing = [name for name in actors | engines if actors.get(name) != engines.get(name)]
        keys = ("scheme", "group_size", "ignore") if scheme.quantized else ("scheme",)
        raise UserError(
            "the actor and the rollout engine would have different quantization",
            where=f"{QUANT}, {OVERRIDES}.quantization_config",
            why=f"{', '.join(f'{QUANT}.{key}={getattr(quant, key)}' for key in keys)} gives {_shown(actors, differing)}"
            f", but {OVERRIDES}.quantization_config has {_shown(engines, differing)}",
            fix=f"change the scheme by the group +qarl={quant.scheme} or by QaRL's quant.*, which set both",
        )
    rollout = composed.actor_rollout_ref.rollout
    copied = ["tensor_model_parallel_size"]
    if composed.trainer.device != "cpu":  # where every engine is eager
        copied.append("enforce_eager")
    for key, mine, engine_key, engines_value in (
        ("head_dtype", quant.head_dtype, f"{OVERRIDES}.head_dtype", _head(overrides)),
        *((key, getattr(quant, key), f"{ROLLOUT}.{key}", rollout[key]) for key in copied),
    ):
        if mine != engines_value:
            raise UserError(
                f"{QUANT}.{key}={mine}, but {engine_key} makes it {engines_value} in the engine",
                where=f"{QUANT}.{key}, {engine_key}",
                why="the actor computes as the engine does only if it knows the engine's settings",
                fix="give both the same value",
            )
    if str(OmegaConf.select(composed, RECEIVER) or "verl.").startswith("verl."):
        raise UserError(
            "vLLM's workers have no receiver for the quantized actor's weights",
            where=RECEIVER,
            why="verl's receiver does not know the records that QaRL publishes",
            fix="set it to qarl.verl.plugin.worker_extension.QaRLWorkerExtension",
        )


def refuse_unused_source(composed: Any, quant: QuantSettings) -> None:
    """Raise UserError if the trainer would ignore `old_log_probs` or `trainer.save_minutes`."""
    minutes = composed.trainer.get("save_minutes", -1)
    for used, key, value, neutral in (
        (quant.old_log_probs != "recompute", f"{QUANT}.old_log_probs", quant.old_log_probs, "recompute"),
        (minutes > 0, "trainer.save_minutes", minutes, -1),
    ):
        if used and composed.trainer.v1.trainer_mode != "qarl_sync":
            raise UserError(
                f"trainer.v1.trainer_mode={composed.trainer.v1.trainer_mode} would ignore {key}={value}",
                where="trainer.v1.trainer_mode",
                why="only QaRL's trainer reads this key",
                fix=f"set trainer.v1.trainer_mode=qarl_sync, or {key}={neutral}",
            )


def _mapping(found: Any) -> dict[str, Any]:
    """Return a part of the config as a dict: {} if it is missing. vLLM also takes JSON in a string."""
    if OmegaConf.is_config(found):
        found = OmegaConf.to_container(found, resolve=True)
    found = json.loads(found) if isinstance(found, str) else found
    return dict(found) if isinstance(found, Mapping) else {}


def _described(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the arithmetic of a `quantization_config`. {}: nothing is quantized."""
    if not config:
        return {}
    found: dict[str, Any] = {"ignore": sorted(config.get("ignore") or [])}
    for group in (config.get("config_groups") or {}).values():
        for side in ("weights", "input_activations"):
            values = group.get(side) or {}
            for name in ("num_bits", "type", "strategy", "group_size") if values else ():
                if values.get(name) is not None:
                    found.setdefault(f"{side}.{name}", []).append(values[name])
    return found


def _shown(config: Mapping[str, Any], names: list[str]) -> str:
    values = {name: config[name] for name in names if name in config}
    shown = [f"{name}={value[0] if len(value) == 1 else value}" for name, value in values.items()]
    return ", ".join(shown) or "nothing quantized"


def _head(overrides: Mapping[str, Any]) -> str:
    return "fp32" if overrides.get("head_dtype") == "float32" else "model"
