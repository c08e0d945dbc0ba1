"""Keys that a run never reads because of the value of another key, such as a band of TBPO with `actor.loss=grpo`.

Such a key is an error, because its value would seem to act. There is one exception: if a YAML file sets the key and the
command line sets the key that switches it off, the file's value is dropped. So `config=quickstart.yaml actor.loss=grpo`
needs no second argument, and the resolved config lists only values that act. In the same way a file's warm-up is
dropped if the command line makes the run shorter than it. `quant.group_size` may stand beside any
scheme, because programs that compare schemes set it once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from qarl.config import objectives, optimizers
from qarl.config.actor import WeightLevel
from qarl.config.errors import Problem, show
from qarl.config.multi_turn import MultiTurnConfig
from qarl.config.read_config import COMMAND_LINE

_IS = "rollout_correction.rollout_is"
_RS = "rollout_correction.rollout_rs"


@dataclass(frozen=True)
class Rule:
    """`keys` are read only if `decider` has a value that `reads` accepts, which `fix` sets."""

    decider: str
    reads: Callable[[Any], bool]
    fix: str
    keys: tuple[str, ...]


def _if(decider: str, values: tuple[Any, ...], *keys: str) -> Rule:
    text = " or ".join(str(value).lower() for value in values)
    return Rule(decider, lambda value: value in values, f"set {decider} to {text}", keys)


def _if_read_by_objective(*keys: str) -> Rule:
    """Return the rule of keys of the section actor that some objectives read, all of them or none."""
    names = objectives.reading(keys[0])
    fix = f"set actor.loss to {' or '.join(names)}"
    qualified = tuple(f"actor.{key}" for key in keys)
    return Rule("actor.loss", lambda loss: loss in objectives.reading(keys[0]), fix, qualified)


def _has_advantages(loss: Any) -> bool:
    names = objectives.objective_names()
    return loss in names and not objectives.get_objective(loss).whitens_rewards


_WITH_ADVANTAGES = [name for name in objectives.objective_names() if _has_advantages(name)]
_SIZES = [f"actor.{kind}_micro_batch_size_per_gpu" for kind in ("ppo", "log_prob")]
_TOKENS = [f"actor.{kind}_max_token_len_per_gpu" for kind in ("ppo", "log_prob")]
RULES = (
    _if_read_by_objective(*objectives.TBPO.keys),
    _if("actor.positive_band", ("two_sided",), "actor.seq_clip_ratio_low"),
    _if("actor.band_scaling", ("length",), "actor.band_reference_length"),
    _if_read_by_objective(*objectives.CLIP_KEYS),
    _if_read_by_objective("clip_ratio_c"),
    _if_read_by_objective("tau_pos", "tau_neg"),
    _if_read_by_objective("mis_imp_ratio_cap"),
    _if("actor.use_kl_loss", (True,), "actor.kl_loss_coef"),
    _if("actor.old_log_probs", ("auto",), "actor.old_log_probs_sample"),
    Rule(
        "optim.name",
        lambda name: name in optimizers.reading("muon_lr"),
        "set optim.name to muon",
        ("optim.muon_lr", "optim.muon_momentum"),
    ),
    _if("optim.lr_scheduler_type", ("cosine",), "optim.min_lr_ratio"),
    _if("actor.use_dynamic_bsz", (False,), *_SIZES),
    _if("actor.use_dynamic_bsz", (True,), *_TOKENS),
    _if(
        _IS,
        get_args(WeightLevel),
        *(f"{_IS}_{name}" for name in ("mode", "threshold", "threshold_lower", "batch_normalize")),
    ),
    _if(f"{_IS}_mode", ("clip", "icepop"), f"{_IS}_threshold_lower"),
    Rule(
        _RS,
        bool,
        f"set {_RS}",
        tuple(f"{_RS}_{name}" for name in ("threshold", "threshold_lower", "ratio")),
    ),
    Rule(
        "actor.loss",
        _has_advantages,
        f"set actor.loss to {' or '.join(_WITH_ADVANTAGES)}",
        (
            "algorithm.adv_estimator",
            "algorithm.norm_adv_by_std_in_grpo",
            "filter_groups.enable",
        ),
    ),
    _if(
        "backend",
        ("local",),
        "filter_groups.enable",
        "reward.overlong_buffer_len",
        "actor.mask_truncated_responses",
        "trainer.save_best",
    ),
    Rule(
        "trainer.test_freq",
        lambda steps: isinstance(steps, int) and steps > 0,
        "set trainer.test_freq to a number of steps",
        ("trainer.save_best",),
    ),
    Rule(
        "reward.overlong_buffer_len",
        bool,
        "set reward.overlong_buffer_len",
        ("reward.overlong_penalty_factor",),
    ),
    Rule(
        "reward.functions",
        lambda functions: not functions,
        "put it into the list reward.functions, or set that to []",
        ("reward.function",),
    ),
    _if("filter_groups.enable", (True,), "filter_groups.max_num_gen_batches"),
    _if("algorithm.adv_estimator", ("grpo", "dr_grpo"), "algorithm.norm_adv_by_std_in_grpo"),
    Rule("rollout.val_temperature", bool, "set rollout.val_temperature to 0.6", ("rollout.val_n",)),
    _if("trainer.resume_mode", ("resume_path",), "trainer.resume_from_path"),
    Rule("lora.r", bool, "set lora.r", ("lora.alpha", "lora.target_modules")),
    Rule(
        "trainer.staleness",
        bool,
        "set trainer.staleness to 1",
        ("trainer.staleness_strategy", "rollout.n_gpus_per_node"),
    ),
    Rule(
        "rollout.environment",
        bool,
        "set rollout.environment",
        tuple(f"multi_turn.{name}" for name in MultiTurnConfig.model_fields),
    ),
)


INSTEAD = ("reward.function",)
"""Keys that a user names in place of their decider, so that also their default is meant to act."""
STEPS = "trainer.total_training_steps"
WARMUP = "optim.lr_warmup_steps"


def warmup_exceeds(values: Mapping[str, Any]) -> bool:
    """Return whether no step of the run would have the full learning rate. A value that is no number says no."""
    steps = values.get(STEPS)
    warmup = values.get(WARMUP)
    return isinstance(steps, int) and isinstance(warmup, int) and 0 < warmup >= steps


def unread(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    """Yield each key whose value differs from its default and has no effect, with the rule that says why.

    `values` and `defaults`: flat, by dotted key. Keys that are missing in `values` are skipped."""
    seen = set()
    for rule in RULES:
        if rule.decider not in values or rule.reads(values[rule.decider]):
            continue
        for key in rule.keys:
            if key in values and key not in seen and values[key] != defaults[key]:
                seen.add(key)
                yield key, rule


def problems(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each key of `values` that has no effect."""
    return [_problem(key, rule, values) for key, rule in unread(values, defaults)]


def named_in_vain(
    values: Mapping[str, Any], defaults: Mapping[str, Any], sources: Mapping[str, str]
) -> list[Problem]:
    """Return a problem for each key of `INSTEAD` that the command line names with its default, and that has no effect.
    `sources`: where each key was given."""
    return [
        _problem(key, rule, values)
        for rule in RULES
        for key in INSTEAD
        if key in rule.keys
        and sources.get(key) == COMMAND_LINE
        and values[key] == defaults[key]
        and not rule.reads(values[rule.decider])
    ]


def _problem(key: str, rule: Rule, values: Mapping[str, Any]) -> Problem:
    reason = f"it has no effect with {rule.decider} = {show(values[rule.decider])}"
    return Problem(key, values[key], reason, f"remove it, or {rule.fix}")


def dropped(
    values: Mapping[str, Any], defaults: Mapping[str, Any], sources: Mapping[str, str]
) -> list[str]:
    """Return the unread keys that a file sets and that an argument of the command line switches off."""

    def decides(decider: str, key: str) -> bool:
        return sources.get(decider) == COMMAND_LINE and sources.get(key) != COMMAND_LINE

    keys = [key for key, rule in unread(values, defaults) if decides(rule.decider, key)]
    if decides(STEPS, WARMUP) and warmup_exceeds(values):
        keys.append(WARMUP)
    return keys
