"""Checks before a verl run starts: keys that verl or QaRL would ignore, and parts of the config that contradict others.

verl builds the actor's and the engine's settings in different processes, each from its own section, so a contradiction
between them shows only after minutes, if at all. A run from QaRL's config makes all checks (`check_run_config`). On
verl's own command line the groups +qarl=SCHEME call `check_composed` as a callback of Hydra's.

This module imports verl only inside functions, because the environment of verl must be set before.
Statements here about verl were checked against the source of verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qarl.config import Config
from qarl.config.checks import LEAST_TEMPERATURE, one_token_is_left
from qarl.config.errors import meant_boolean
from qarl.config.schema import MIN_TEMPERATURE
from qarl.errors import UserError
from qarl.verl.added_keys import unread_keys
from qarl.verl.batch_checks import reading_conflicts, refuse_partial_batches
from qarl.verl.keys import (
    ACTOR,
    CORRECTION,
    LOSS_MODES,
    OWN_KEYS,
    POLICY_LOSS,
    QUANT,
    ROLLOUT,
    SEPARATE_MODE,
    environment_keys,
)
from qarl.verl.named_files import missing_files
from qarl.verl.refusals import Conflict, attempt, raise_all
from qarl.verl.separate_checks import separate_conflicts

KV_CACHE = "engine_kwargs.vllm.kv_cache_dtype"
VLLM_QUANTIZATION = "engine_kwargs.vllm.quantization"


def refuse_unsupported(config: Config) -> None:
    """Raise a UserError that names all keys of `config` that are true and that verl does not support."""
    # verl's reference policy needs keys of its own, which only the section verl has.
    asked = {
        "rollout.rebuild_on_failure": config.rollout.rebuild_on_failure,
        "actor.use_kl_loss": config.actor.use_kl_loss,
    }
    keys = [key for key, value in asked.items() if value]
    if not keys:
        return
    supported = ", ".join(f"{key}=false" for key in keys)
    fix = f"set {supported}, or backend=local"
    raise UserError(f"backend=verl supports only {supported}", where=", ".join(keys), fix=fix)


def refuse_own(config: Config) -> None:
    """Raise UserError if the section `verl` sets a key that QaRL has its own key for: one of `OWN_KEYS`, with
    `rollout.environment` one of `environment_keys`, or verl's corrections. With the loss tbpo, `check_composed` says
    more about these."""
    keys = OWN_KEYS | (environment_keys() if config.rollout.environment is not None else {})
    for key in config.verl:
        plain = key.removeprefix("+")
        corrects = plain.startswith(CORRECTION) and config.actor.loss != "tbpo"
        own = next((key for key in keys if f"{plain}.".startswith(f"{key}.")), None)
        if own or corrects:
            raise UserError(
                f"the section verl sets {key}, but QaRL has its own keys for that",
                where=f"verl.{key}",
                why="QaRL would check, resume and measure a different run from the one that verl makes",
                fix=f"set {keys[own] if own else 'the keys of the section rollout_correction'} instead",
            )


def refuse_words_for_booleans(config: Config, defaults: Any, composed: Any) -> None:
    """Raise UserError if the section `verl` has a text where verl's `defaults` have true or false, which verl would
    take for true, whatever it says. An interpolation counts as what it is in `composed`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for key in config.verl:
        default = OmegaConf.select(defaults, key.removeprefix("+"), throw_on_missing=False)
        if not isinstance(default, bool):
            continue
        try:
            value = OmegaConf.select(composed, key.removeprefix("+"))
        except OmegaConfBaseException as error:
            raise UserError(
                f"verl.{key}={config.verl[key]} has no value",
                where=f"verl.{key}",
                why=str(error).splitlines()[0],
                fix="correct the interpolation, or write true or false",
            ) from error
        if isinstance(value, str):
            meant = meant_boolean(value)
            raise UserError(
                f"verl.{key} is the text {value!r}, and not true or false",
                where=f"verl.{key}",
                why="verl would take every text for true",
                fix=f"write {meant}" if meant else "write true or false",
            )


def check_run_config(config: Config, composed: Any) -> None:
    """Run QaRL's and verl's own checks of verl's config `composed`, which was made from `config`."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    of_run = [conflict.error(prefix="verl.") for conflict in run_conflicts(config, composed)]
    raise_all([*of_run, *composed_errors(composed)])
    refuse_partial_batches(composed, {key.removeprefix("+") for key in config.verl})
    try:
        reference = need_reference_policy(composed)
        critic = need_critic(composed)
        validate_config(config=composed, use_reference_policy=reference, use_critic=critic)
        omega_conf_to_dataclass(composed.actor_rollout_ref.rollout)
        omega_conf_to_dataclass(composed.algorithm)
    except Exception as error:  # assertions, ValueErrors and hydra's own, depending on the key
        raise UserError(
            "verl refuses the configuration",
            where=f"{type(error).__name__} from verl",
            why=" ".join(str(error).split())[:600],
            fix="change the keys that it names; dry_run=true prints all of verl's keys",
        ) from error


def run_conflicts(config: Config, composed: Any) -> Iterator[Conflict]:
    """Yield verl's keys that set loggers or checkpoints as a run of QaRL's config does not support."""
    trainer = composed.trainer
    loggers = trainer.logger or ()
    if "file" not in loggers:
        yield Conflict(
            key="trainer.logger",
            value=trainer.logger,
            good="a list that contains file",
            why="QaRL reads the metrics from verl's file logger; without it the run would end as if it had taken "
            "no step",
        )
    if trainer.max_actor_ckpt_to_keep == 1 or trainer.get("remove_previous_ckpt_in_save"):
        yield Conflict(
            key="trainer.max_actor_ckpt_to_keep",
            value=1,
            good="2 or more (trainer.max_ckpt_to_keep=2)",
            why="verl deletes the old checkpoint before the next is complete; a run killed in between would lose both",
        )
    yield from _export_conflicts(config, composed)


def _export_conflicts(config: Config, composed: Any) -> Iterator[Conflict]:
    """Yield keys with which no checkpoint could be exported at the end."""
    trainer = composed.trainer
    saved = composed.actor_rollout_ref.actor.checkpoint.save_contents
    contents = f"{ACTOR}.checkpoint.save_contents"
    exports = config.trainer.save_final
    lost = "there would be no checkpoint to export at the end (trainer.save_final)"
    if exports and trainer.save_freq <= 0:
        yield Conflict("trainer.save_freq", trainer.save_freq, "a number above 0", lost)
    folder = Path(trainer.default_local_dir).resolve()
    if exports and folder != (config.run_dir / "checkpoints").resolve():
        yield Conflict("trainer.default_local_dir", folder, "null (leave it out)", lost)
    if config.lora.r and "hf_model" in saved:
        yield Conflict(
            key=contents,
            value=saved,
            good="a list without hf_model",
            why="a checkpoint has the adapter and no model; qarl export writes base and adapter",
        )
    if exports and "model" not in saved:
        yield Conflict(contents, saved, "a list with model", lost)


def check_composed(composed: Any) -> None:
    """Raise UserError if verl's config `composed` names files that are missing, or has parts that contradict each other
    or that QaRL does not support. One error names them all.

    Without a quantized actor, of the settings only the rollout's log-probs and corrections are checked."""
    raise_all([*missing_files(composed), *composed_errors(composed)])


def composed_errors(composed: Any) -> list[UserError]:
    """Return what `check_composed` raises, one error for each setting."""
    from verl.utils.config import omega_conf_to_dataclass

    from qarl.verl.config_classes import actor_settings
    from qarl.verl.engine_checks import disagreements, engine_errors
    from qarl.verl.turn_checks import turn_errors

    errors = list(unread_keys(composed))
    if any((error.where or "").startswith(f"+{ACTOR}.") for error in errors):
        return errors  # verl's class of the actor would refuse them in fewer words
    actor = attempt(lambda: omega_conf_to_dataclass(composed.actor_rollout_ref.actor), errors)
    quant = None if actor is None else getattr(actor.engine, "quant", None)
    ours = composed.actor_rollout_ref.actor.policy_loss.loss_mode in LOSS_MODES
    conflicts = list(_log_prob_conflicts(composed, quant))
    if quant is not None or ours:
        conflicts += _sampling_conflicts(composed)
        conflicts += _trainer_conflicts(composed)
        conflicts += reading_conflicts(composed.data)
        conflicts += separate_conflicts(composed)
    errors += [conflict.error() for conflict in conflicts]
    if quant is not None or ours:
        errors += turn_errors(composed)
    if actor is not None and ours:
        attempt(lambda: actor_settings(actor, actor.loss_agg_mode), errors)
    if actor is not None and quant is not None:
        errors += engine_errors(composed.actor_rollout_ref.model, actor.engine)
        errors += disagreements(composed, quant)
    return errors


def _log_prob_conflicts(composed: Any, quant: Any) -> Iterator[Conflict]:
    """Yield who needs the rollout's log-probs and would not get them, and what TBPO does not go with. `quant`: the
    actor's `QuantSettings`, or None."""
    from qarl.verl.batch_weights import normalised_by_qarl, without_batch

    trainer = composed.trainer
    loss = composed.actor_rollout_ref.actor.policy_loss.loss_mode
    source = "recompute" if quant is None else quant.old_log_probs
    needed = loss in LOSS_MODES or source != "recompute"
    if needed and not composed.actor_rollout_ref.rollout.calculate_log_probs:
        yield Conflict(
            key=f"{ROLLOUT}.calculate_log_probs",
            value=False,
            good=True,
            why=f"{POLICY_LOSS}.loss_mode={loss} and {QUANT}.old_log_probs={source} need the rollout's log-probs",
        )
    mode = trainer.v1.trainer_mode
    if mode == "sync":
        unread = f"trainer.v1.trainer_mode={mode} would ignore it; only qarl_sync reads this key"
        minutes = trainer.get("save_minutes", -1)
        if source != "recompute":
            yield Conflict(f"{QUANT}.old_log_probs", source, "recompute", unread)
        if minutes > 0:
            yield Conflict("trainer.save_minutes", minutes, -1, unread)
        if loss in LOSS_MODES and normalised_by_qarl(composed):
            yield without_batch(f"trainer.v1.trainer_mode={mode} computes no such weights")
    if loss == "tbpo":
        yield from _corrections_beside_tbpo(composed)


def _corrections_beside_tbpo(composed: Any) -> Iterator[Conflict]:
    effects = {
        "bypass_mode": "replaces the trainer's log-probs by the rollout's, so TBPO would see no mismatch",
        "rollout_is": "adds a weight for each token, but TBPO already weights the whole sequence",
        "rollout_rs": "removes tokens before TBPO forms a response's ratio and the mismatch is measured",
    }
    for name, effect in effects.items():
        value = composed.algorithm.rollout_correction.get(name)
        if value:
            why = f"with TBPO, it {effect}"
            yield Conflict(f"{CORRECTION}.{name}", value, "false or null", why)


def _sampling_conflicts(composed: Any) -> Iterator[Conflict]:
    """Yield settings of the rollout with which the trainer's log-probs are of other tokens, or of no choice at all."""
    rollout = composed.actor_rollout_ref.rollout
    whole = "the engine would sample only from the likeliest tokens, but the trainer's log-probs cover all tokens"
    if rollout.top_p != 1:
        yield Conflict(f"{ROLLOUT}.top_p", rollout.top_p, 1, whole)
    if rollout.top_k > 0:
        yield Conflict(f"{ROLLOUT}.top_k", rollout.top_k, -1, whole)
    temperature = rollout.temperature
    if temperature < MIN_TEMPERATURE:
        why = f"vLLM samples at {MIN_TEMPERATURE} instead, but the trainer's log-probs would use the lower temperature"
    elif left := one_token_is_left(temperature, 1.0, -1):
        why = left[2]
    else:
        return
    yield Conflict(f"{ROLLOUT}.temperature", temperature, LEAST_TEMPERATURE, why)


def _trainer_conflicts(composed: Any) -> Iterator[Conflict]:
    """Yield engines, trainers and schedules that QaRL does not run in, and keys that verl's v1 trainer ignores."""
    trainer = composed.trainer
    mode = trainer.v1.trainer_mode
    if not trainer.use_v1:
        yield Conflict("trainer.use_v1", False, True, "QaRL runs only in verl's v1 trainer")
    if mode not in ("sync", "qarl_sync", SEPARATE_MODE):
        yield Conflict(
            key="trainer.v1.trainer_mode",
            value=mode,
            good=f"qarl_sync (trainer.staleness in QaRL's config sets {SEPARATE_MODE})",
            why="QaRL does not run in it, and nobody would know which version of the weights sampled a token",
        )
    yield from _rollout_conflicts(composed.actor_rollout_ref.rollout)
    steps = trainer.get("total_training_steps") or 0
    warmup = composed.actor_rollout_ref.actor.optim.get("lr_warmup_steps") or 0
    if 0 < steps <= warmup:
        yield Conflict(
            key=f"{ACTOR}.optim.lr_warmup_steps",
            value=warmup,
            good=f"a number below {steps}",
            why=f"the run has {steps} steps (trainer.total_training_steps), so no step would have the full "
            "learning rate",
        )


def _rollout_conflicts(rollout: Any) -> Iterator[Conflict]:
    """Yield engines that QaRL does not publish to, and settings that would quantize twice."""
    vllm = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    engine = rollout.get("name") or "vllm"  # a missing value is verl's own error
    if engine != "vllm":
        yield Conflict(f"{ROLLOUT}.name", engine, "vllm", "QaRL publishes to vLLM alone")
    twice = "the group +qarl=SCHEME quantizes the engine, and this would quantize it a second time"
    quantizations = {
        "quantization": rollout.get("quantization"),
        VLLM_QUANTIZATION: vllm.get("quantization"),
    }
    for key, value in quantizations.items():
        if value is not None:
            yield Conflict(f"{ROLLOUT}.{key}", value, "null", twice)
    kv_cache = vllm.get("kv_cache_dtype")
    if kv_cache not in (None, "auto", "bfloat16"):
        scales = "its scales are not published, and vLLM forgets them when it sleeps"
        yield Conflict(f"{ROLLOUT}.{KV_CACHE}", kv_cache, "auto", scales)
