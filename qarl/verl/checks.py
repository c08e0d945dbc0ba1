"""Checks before a verl run starts: keys that verl or QaRL would ignore, and parts of the config that contradict others.

verl builds the actor's and the engine's settings in different processes, each from its own section, so a contradiction
between them shows only after minutes, if at all. A run from QaRL's config makes all checks (`check_run_config`). On
verl's own command line the groups +qarl=SCHEME call `check_composed` as a callback of Hydra's.

This module imports verl only inside functions, because the environment of verl must be set before.
Statements here about verl were checked against the source of verl 0.9.1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qarl.config import Config
from qarl.config.checks import LEAST_TEMPERATURE, one_token_is_left
from qarl.config.schema import MIN_TEMPERATURE
from qarl.errors import UserError
from qarl.schemes import get_scheme
from qarl.verl.added_keys import unread_keys
from qarl.verl.config import CORRECTION, PLUGIN
from qarl.verl.refusals import Problem, attempt, errors_of, raise_all

if TYPE_CHECKING:
    from qarl.verl.config_classes import QuantSettings

ACTOR, ROLLOUT, REFERENCE = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
QUANT = f"{ACTOR}.fsdp_config.quant"
OVERRIDES = f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides"
RECEIVER = f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls"

OWN_KEYS = {
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.hf_config_path": "model.path",
    "actor_rollout_ref.model.tokenizer_path": "model.path",
    "data.train_files": "data.train_files",
    "data.val_files": "data.val_files",
    "trainer.total_training_steps": "trainer.total_training_steps",
    "trainer.total_epochs": "trainer.total_training_steps",
    "trainer.resume_mode": "trainer.resume_mode",
    "trainer.resume_from_path": "trainer.resume_from_path",
    f"{ROLLOUT}.tensor_model_parallel_size": "rollout.tensor_model_parallel_size",
    f"{ACTOR}.fsdp_config.model_dtype": "optim.master_dtype",
    f"{ACTOR}.optim.optimizer": "optim.name",
    f"{ACTOR}.optim.optimizer_impl": "optim.name",
    "reward.custom_reward_function.path": "reward.function",
    "reward.custom_reward_function.name": "reward.function",
}
"""verl's keys that the section `verl` may not set, each with QaRL's key to set instead. QaRL reads only its own keys to
check model, data and reward, to choose the checkpoint and to decide whether the run is finished."""
KV_CACHE = "engine_kwargs.vllm.kv_cache_dtype"
VLLM_QUANTIZATION = "engine_kwargs.vllm.quantization"
BATCH_KEYS = {
    f"{ACTOR}.ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "actor.ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.ppo_max_token_len_per_gpu": "actor.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "actor.log_prob_micro_batch_size_per_gpu",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": "actor.log_prob_max_token_len_per_gpu",
}
"""verl's batch sizes that QaRL's config sets, and QaRL's names for them."""


def refuse_unsupported(config: Config) -> None:
    """Raise a UserError that names all keys of `config` that are true and that verl does not support."""
    rebuild = config.rollout.rebuild_on_failure
    kl_loss = config.actor.use_kl_loss
    # verl's reference policy needs keys of its own, which only the section verl has.
    keys = ["rollout.rebuild_on_failure"] * rebuild + ["actor.use_kl_loss"] * kl_loss
    if wanted := ", ".join(f"{key}=false" for key in keys):
        fix = f"set {wanted}, or backend=local"
        raise UserError(f"backend=verl supports only {wanted}", where=", ".join(keys), fix=fix)


def refuse_own(config: Config) -> None:
    """Raise UserError if the section `verl` sets a key that QaRL has its own key for: one of `OWN_KEYS`, or verl's
    corrections. With the loss tbpo, `check_composed` says more about these."""
    for key in config.verl:
        plain = key.removeprefix("+")
        corrects = plain.startswith(CORRECTION) and config.actor.loss != "tbpo"
        if plain in OWN_KEYS or corrects:
            raise UserError(
                f"the section verl sets {key}, but QaRL has its own keys for that",
                where=f"verl.{key}",
                why="QaRL would check, resume and measure a different run from the one that verl makes",
                fix=f"set {OWN_KEYS.get(plain, 'the keys of the section rollout_correction')} instead",
            )


def check_run_config(config: Config, composed: Any) -> None:
    """Run QaRL's and verl's own checks of verl's config `composed`, which was made from `config`."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    raise_all([*run_errors(config, composed), *composed_errors(composed)])
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


def run_errors(config: Config, composed: Any) -> Iterator[UserError]:
    """Yield an error for each of verl's keys that sets loggers or checkpoints as a run of QaRL's config does not
    support."""
    trainer = composed.trainer
    saved = composed.actor_rollout_ref.actor.checkpoint.save_contents
    folder = Path(trainer.default_local_dir).resolve()
    ours = (config.run_dir / "checkpoints").resolve()
    unread = "QaRL reads the metrics from verl's file logger; without it the run would end as if it had taken no step"
    lost = "verl deletes the old checkpoint before the next is complete; a run killed in between would lose both"
    export = "there would be no checkpoint to export at the end (trainer.save_final)"
    exports = config.trainer.save_final
    whole_model = "a checkpoint has the adapter and no model; qarl export writes base and adapter"
    merged = bool(config.lora.r) and "hf_model" in saved
    only = trainer.max_actor_ckpt_to_keep == 1 or trainer.get("remove_previous_ckpt_in_save")
    problems: tuple[Problem, ...] = (
        (
            "file" not in (trainer.logger or ()),
            "trainer.logger",
            trainer.logger,
            "a list that contains file",
            unread,
        ),
        (only, "trainer.max_actor_ckpt_to_keep", 1, "2 or more (trainer.max_ckpt_to_keep=2)", lost),
        (
            exports and trainer.save_freq <= 0,
            "trainer.save_freq",
            trainer.save_freq,
            "a number above 0",
            export,
        ),
        (
            exports and folder != ours,
            "trainer.default_local_dir",
            folder,
            "null (leave it out)",
            export,
        ),
        (
            merged,
            f"{ACTOR}.checkpoint.save_contents",
            saved,
            "a list without hf_model",
            whole_model,
        ),
        (
            exports and "model" not in saved,
            f"{ACTOR}.checkpoint.save_contents",
            saved,
            "a list with model",
            export,
        ),
    )
    return errors_of(problems, prefix="verl.")


def refuse_partial_batches(composed: Any, written: set[str]) -> None:
    """Raise UserError unless all ranks get equal shares of each batch, and a share splits into whole micro-batches.

    verl pads the responses of a step to whole mini-batches and gives every rank an equal share: of the whole step to
    compute log-probs, of a mini-batch for an update. It checks the shares only in the first step, after a whole
    generation, and its AssertionErrors name no key. If micro-batches are filled by tokens (`use_dynamic_bsz`), shares
    need only be equal, and a row of full length must fit into a micro-batch. See `_get_required_batch_multiple`
    (trainer/ppo/v1/trainer_base.py), `train_mini_batch` (workers/engine_workers.py) and `prepare_micro_batches`
    (workers/engine/utils.py). QaRL uses no critic. `written`: the keys of the section `verl`.
    """
    from omegaconf import OmegaConf

    actor = composed.actor_rollout_ref.actor
    rollout = composed.actor_rollout_ref.rollout
    trainer = composed.trainer
    reference = actor.use_kl_loss or composed.algorithm.use_kl_in_reward
    prompts = composed.data.train_batch_size
    mini = actor.ppo_mini_batch_size
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    responses = mini * rollout.n

    def refuse(key: str, problem: str, fix: str) -> UserError:
        name = BATCH_KEYS[key] if key in BATCH_KEYS and key not in written else f"verl.{key}"
        why = f"{prompts} prompts, {rollout.n} responses each, mini-batches of {mini} prompts, {ranks} ranks"
        return UserError(
            f"{name}={OmegaConf.select(composed, key)} {problem}", where=name, why=why, fix=fix
        )

    if responses % ranks:
        unit = ranks // math.gcd(ranks, rollout.n)
        problem = f"does not give each of {ranks} ranks the same number of responses"
        raise refuse(
            f"{ACTOR}.ppo_mini_batch_size",
            problem,
            f"make it and data.train_batch_size multiples of {unit}",
        )
    multiple = math.lcm(responses, ranks)
    step = math.ceil(prompts * rollout.n / multiple) * multiple
    longest = composed.data.max_prompt_length + composed.data.max_response_length
    shares = [(f"{ACTOR}.ppo", responses // ranks)]
    if actor.use_dynamic_bsz or not composed.algorithm.rollout_correction.bypass_mode:
        shares.append((f"{ROLLOUT}.log_prob", step // ranks))
    if reference:
        shares.append((f"{REFERENCE}.log_prob", step // ranks))
    for part, share in shares:
        key = f"{part}_{'max_token_len' if actor.use_dynamic_bsz else 'micro_batch_size'}_per_gpu"
        limit = OmegaConf.select(composed, key)
        if not isinstance(limit, int) or limit < 1:
            raise refuse(key, "is not a whole number above 0", "set it to 1 or more")
        if actor.use_dynamic_bsz and limit < longest:
            raise refuse(
                key, f"does not hold a row of {longest} tokens", f"set it to {longest} or more"
            )
        if not actor.use_dynamic_bsz and share % limit:
            fix = f"choose a divisor of {share}"
            raise refuse(key, f"does not divide a rank's {share} responses", fix)


def check_composed(composed: Any) -> None:
    """Raise UserError if verl's config `composed` has parts that contradict each other or that QaRL does not support.
    One error names them all. Without a quantized actor, only the rollout's log-probs and corrections are checked."""
    raise_all(composed_errors(composed))


def composed_errors(composed: Any) -> list[UserError]:
    """Return what `check_composed` raises, one error for each setting."""
    from verl.utils.config import omega_conf_to_dataclass

    from qarl.verl.config_classes import actor_settings, engine_errors
    from qarl.verl.loss import OURS

    errors = list(unread_keys(composed))
    if any((error.where or "").startswith(f"+{ACTOR}.") for error in errors):
        return errors  # verl's class of the actor would refuse them in fewer words
    actor = attempt(lambda: omega_conf_to_dataclass(composed.actor_rollout_ref.actor), errors)
    quant = None if actor is None else getattr(actor.engine, "quant", None)
    loss = composed.actor_rollout_ref.actor.policy_loss.loss_mode
    errors += errors_of(_log_prob_problems(composed, quant))
    if quant is not None or loss in OURS:
        errors += errors_of(_sampling_problems(composed))
        errors += errors_of(_trainer_problems(composed))
    if actor is not None and loss in OURS:
        attempt(lambda: actor_settings(actor, actor.loss_agg_mode), errors)
    if actor is not None and quant is not None:
        errors += engine_errors(composed.actor_rollout_ref.model, actor.engine)
        errors += other_engine_errors(composed, quant)
    return errors


def _log_prob_problems(composed: Any, quant: QuantSettings | None) -> Iterator[Problem]:
    """Yield who needs the rollout's log-probs and would not get them, and what TBPO does not go with."""
    from qarl.verl.loss import OURS

    trainer = composed.trainer
    loss = composed.actor_rollout_ref.actor.policy_loss.loss_mode
    source = "recompute" if quant is None else quant.old_log_probs
    mode = trainer.v1.trainer_mode
    plain = mode == "sync"
    lacks = not composed.actor_rollout_ref.rollout.calculate_log_probs and (
        loss in OURS or source != "recompute"
    )
    reader = f"{ACTOR}.policy_loss.loss_mode={loss} and {QUANT}.old_log_probs={source} need the rollout's log-probs"
    unread = f"trainer.v1.trainer_mode={mode} would ignore it; only qarl_sync reads this key"
    minutes = trainer.get("save_minutes", -1)
    yield lacks, f"{ROLLOUT}.calculate_log_probs", False, True, reader
    yield plain and source != "recompute", f"{QUANT}.old_log_probs", source, "recompute", unread
    yield plain and minutes > 0, "trainer.save_minutes", minutes, -1, unread
    for key, why in (
        (
            "bypass_mode",
            "replaces the trainer's log-probs by the rollout's, so TBPO would see no mismatch",
        ),
        ("rollout_is", "adds a weight for each token, but TBPO already weights the whole sequence"),
        (
            "rollout_rs",
            "removes tokens before TBPO forms a response's ratio and the mismatch is measured",
        ),
    ):
        value = composed.algorithm.rollout_correction.get(key)
        yield (
            loss == "tbpo" and value,
            f"{CORRECTION}.{key}",
            value,
            "false or null",
            f"with TBPO, it {why}",
        )


def _sampling_problems(composed: Any) -> Iterator[Problem]:
    """Yield settings of the rollout with which the trainer's log-probs are of other tokens, or of no choice at all."""
    rollout = composed.actor_rollout_ref.rollout
    whole = "the engine would sample only from the likeliest tokens, but the trainer's log-probs cover all tokens"
    below = f"vLLM samples at {MIN_TEMPERATURE} instead, but the trainer's log-probs would use the lower temperature"
    yield rollout.top_p != 1, f"{ROLLOUT}.top_p", rollout.top_p, 1, whole
    yield rollout.top_k > 0, f"{ROLLOUT}.top_k", rollout.top_k, -1, whole
    if rollout.temperature < MIN_TEMPERATURE:
        yield True, f"{ROLLOUT}.temperature", rollout.temperature, LEAST_TEMPERATURE, below
    elif left := one_token_is_left(rollout.temperature, 1.0, -1):
        yield True, f"{ROLLOUT}.temperature", rollout.temperature, LEAST_TEMPERATURE, left[2]


def _trainer_problems(composed: Any) -> Iterator[Problem]:
    """Yield engines, trainers and schedules that QaRL does not run in, and keys that verl's v1 trainer ignores."""
    rollout = composed.actor_rollout_ref.rollout
    trainer = composed.trainer
    optim = composed.actor_rollout_ref.actor.optim
    mode = trainer.v1.trainer_mode
    vllm = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    other = mode not in ("sync", "qarl_sync")
    stale = "responses would come from several versions of the weights, and quant.mismatch_limit would report an error"
    engine = rollout.get("name") or "vllm"  # a missing value is verl's own error
    only = "QaRL publishes to vLLM alone"
    twice = "the group +qarl=SCHEME quantizes the engine, and this would quantize it a second time"
    kv_cache = vllm.get("kv_cache_dtype")
    scales = "its scales are not published, and vLLM forgets them when it sleeps"
    loop = rollout.agent.default_agent_loop
    alone = rollout.multi_turn.enable and "single_turn" in str(loop)
    turns = f"verl's v1 trainer does not read it, and {ROLLOUT}.agent.default_agent_loop={loop} makes one turn"
    tool = f"false; for several turns set {ROLLOUT}.agent.default_agent_loop=tool_agent, or name a loop in the column "
    steps = trainer.get("total_training_steps") or 0
    warmup = optim.get("lr_warmup_steps") or 0
    late = f"the run has {steps} steps (trainer.total_training_steps), so no step would have the full learning rate"
    yield not trainer.use_v1, "trainer.use_v1", False, True, "QaRL runs only in verl's v1 trainer"
    yield other, "trainer.v1.trainer_mode", mode, "qarl_sync", stale
    yield engine != "vllm", f"{ROLLOUT}.name", engine, "vllm", only
    for key, value in (
        ("quantization", rollout.get("quantization")),
        (VLLM_QUANTIZATION, vllm.get("quantization")),
    ):
        yield value is not None, f"{ROLLOUT}.{key}", value, "null", twice
    yield (
        kv_cache not in (None, "auto", "bfloat16"),
        f"{ROLLOUT}.{KV_CACHE}",
        kv_cache,
        "auto",
        scales,
    )
    yield alone, f"{ROLLOUT}.multi_turn.enable", True, f"{tool}agent_name", turns
    yield (
        0 < steps <= warmup,
        f"{ACTOR}.optim.lr_warmup_steps",
        warmup,
        f"a number below {steps}",
        late,
    )


def other_engine_errors(composed: Any, quant: QuantSettings) -> Iterator[UserError]:
    """Yield an error for each setting of vLLM that is not what the actor (`quant`) computes with."""
    from omegaconf import OmegaConf

    overrides = as_dict(OmegaConf.select(composed, OVERRIDES))
    scheme = get_scheme(quant.scheme, group_size=quant.group_size)
    actors = _arithmetic(scheme.quantization_config(quant.ignore) if scheme.quantized else {})
    engines = _arithmetic(as_dict(overrides.get("quantization_config")))
    if actors != engines:

        def shown(config: dict[str, Any]) -> str:
            differing = [name for name in actors | engines if actors.get(name) != engines.get(name)]
            return (
                ", ".join(f"{name}={config[name]}" for name in differing if name in config)
                or "nothing quantized"
            )

        settings = ", ".join(
            f"{QUANT}.{key}={getattr(quant, key)}" for key in ("scheme", "group_size", "ignore")
        )
        yield UserError(
            "the actor and the rollout engine would have different quantization",
            where=f"{QUANT}, {OVERRIDES}.quantization_config",
            why=f"{settings} gives {shown(actors)}, but {OVERRIDES}.quantization_config has {shown(engines)}",
            fix=f"change the scheme by the group +qarl={quant.scheme} or by QaRL's quant.*, which set both",
        )
    rollout = composed.actor_rollout_ref.rollout
    on_cpu = composed.trainer.device == "cpu"  # where every engine is eager
    engines_values = {
        "head_dtype": "fp32" if overrides.get("head_dtype") == "float32" else "model",
        "tensor_model_parallel_size": rollout.tensor_model_parallel_size,
        "enforce_eager": quant.enforce_eager if on_cpu else rollout.enforce_eager,
    }
    why = f"{ROLLOUT} makes it that in the engine, and the actor computes as the engine only if both are equal"
    rows = [(name, getattr(quant, name), value) for name, value in engines_values.items()]
    vllm = as_dict(OmegaConf.select(composed, f"{ROLLOUT}.engine_kwargs.vllm"))
    rows.append(("lora.r", quant.lora.r or 0, vllm.get("max_lora_rank") or 0))
    problems = [(mine != value, f"{QUANT}.{name}", mine, value, why) for name, mine, value in rows]
    if quant.lora.r:
        workers = rollout.tensor_model_parallel_size
        backend = rollout.checkpoint_engine.backend
        enabled = vllm.get("enable_lora", False)
        adapts = "the engine gets an adapter, which is compared with the layers of its one worker"
        together = (
            "separate rollout workers do not tell the actor whether they have the adapter's base"
        )
        problems += [
            (not enabled, f"{ROLLOUT}.engine_kwargs.vllm.enable_lora", enabled, True, adapts),
            (workers != 1, f"{ROLLOUT}.tensor_model_parallel_size", workers, 1, adapts),
            (
                backend != "naive",
                f"{ROLLOUT}.checkpoint_engine.backend",
                backend,
                "naive",
                together,
            ),
        ]
    receiver = str(OmegaConf.select(composed, RECEIVER) or "verl.")
    why = "it is no receiver for what QaRL publishes: verl's does not know the records of a publish"
    good = f"{PLUGIN}.worker_extension.QaRLWorkerExtension"
    yield from errors_of([*problems, (receiver.startswith("verl."), RECEIVER, receiver, good, why)])


def as_dict(section: Any) -> dict[str, Any]:
    """Return a part of the config as a dict: {} if it is missing. vLLM also takes JSON in a string."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(section):
        section = OmegaConf.to_container(section, resolve=True)
    return dict(json.loads(section) if isinstance(section, str) else section or {})


def _arithmetic(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return what decides the arithmetic of a `quantization_config`. {}: nothing is quantized."""
    settings: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            settings |= _arithmetic(value, f"{name}.")
        elif name in ("num_bits", "type", "strategy", "group_size", "ignore") and value is not None:
            settings[prefix + name] = sorted(value) if name == "ignore" else value
    return settings
