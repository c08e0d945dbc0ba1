"""Find what works in a valid config but is probably not meant. A run says it when it starts, and so does the doctor.

The types in `qarl.config` refuse values that cannot work. `Sane`, beside a key's type, finds values that work but are
almost certainly mistakes, such as a learning rate of 4096. The bounds are wide, so every reasonable run is within them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from qarl.config.errors import meant_boolean, show
from qarl.config.objectives import get_objective
from qarl.config.schema import Config
from qarl.config.types import Sane, Section
from qarl.config.unused_keys import RULES
from qarl.errors import UserError
from qarl.schemes import get_scheme

IN_THE_PAPER = ("actor.seq_clip_ratio_low",)
"""Keys that the table of the paper's appendix B gives a value, which is their default, and that no default run reads.
So a file with the paper's values may list them."""


def unusual_values(config: Config) -> list[UserError]:
    """Return values of `config` that are outside their bounds, and combinations of values that make no sense."""
    return [
        *_outside(config),
        *_together(config),
        *_words_for_booleans(config),
        *_unread_escapes(config),
    ]


def _outside(section: Any, prefix: str = "") -> Iterator[UserError]:
    for name, info in type(section).model_fields.items():
        key = f"{prefix}{name}"
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _outside(value, f"{key}.")
            continue
        for sane in info.metadata:
            if not isinstance(sane, Sane) or value is None or sane.low <= value <= sane.high:
                continue
            limit, side = (sane.low, "below") if value < sane.low else (sane.high, "above")
            yield UserError(
                f"{key}={show(value)} is {side} {show(limit)}",
                where=key,
                why="no usual run has such a value, so it is probably a mistake",
                fix=f"choose {show(sane.low)} to {show(sane.high)}, unless this is what you want",
            )


def _together(config: Config) -> Iterator[UserError]:
    """Yield combinations of values that make no sense.

    docs/lookup/results/ablations.md has the eight runs of the last one."""
    actor = config.actor
    prompts = config.data.train_batch_size
    updates = prompts // actor.ppo_mini_batch_size * actor.ppo_epochs
    has_ratio = get_objective(actor.loss).has_ratio
    if not has_ratio and updates != 1:
        what = f"actor.loss={actor.loss} makes {updates} updates per step"
        why = (
            "it has no ratio to the policy that sampled, so every update after the first is biased"
        )
        fix = f"set actor.ppo_mini_batch_size={prompts} and actor.ppo_epochs=1"
        yield UserError(what, where="actor.loss", why=why, fix=fix)
    yield from _uncorrected(config)
    from_rollout = actor.old_log_probs == "rollout"
    far = not config.quant.align.low_bit and get_scheme(config.quant.scheme).is_coarse
    if far and has_ratio and (from_rollout or config.rollout_correction.bypass_mode):
        yield UserError(
            "the ratio of the loss contains the mismatch of 4-bit rollouts",
            where="actor.old_log_probs" if from_rollout else "rollout_correction.bypass_mode",
            why="it is far from 1 on some tokens before any update; in W4A16 eight of eight runs with GRPO collapsed",
            fix="set quant.align=model, or actor.old_log_probs=recompute without bypass_mode",
        )


def _uncorrected(config: Config) -> Iterator[UserError]:
    """Yield a run on stale responses in which nothing corrects for the weights that sampled them."""
    correction = config.rollout_correction
    loss = config.actor.loss
    if not config.trainer.staleness or get_objective(loss).weights_mismatch:
        return
    if correction.rollout_is is None and not correction.bypass_mode:
        yield UserError(
            f"nothing corrects the staleness of up to {config.trainer.staleness} steps",
            where="trainer.staleness",
            why=f"the ratio of actor.loss={loss} is to the policy before the step, not to the one that sampled",
            fix="set rollout_correction.rollout_is=token or sequence, or actor.loss=tbpo",
        )


def _words_for_booleans(config: Config) -> Iterator[UserError]:
    """Yield variables of the chat template whose text is a word for true or false. It may be meant as a text: `no` is
    Norwegian, too."""
    key = "data.apply_chat_template_kwargs"
    for name, value in config.data.apply_chat_template_kwargs.items():
        if meant := meant_boolean(value):
            yield UserError(
                f"{key}.{name} is the text {value!r}, and not {meant}",
                where=key,
                why="the config is YAML 1.2, in which only true and false are truth values, "
                "and a template that asks for a truth value takes every text for true",
                fix=f"write {name}: {meant}, unless the template reads a text",
            )


_ESCAPE = re.compile(r"\\[nrt]")
"""A backslash and a letter that double quotes of YAML, and most programming languages, read as white space."""


def _unread_escapes(config: Config) -> Iterator[UserError]:
    """Yield texts that end a response and have a backslash where a line break or a tab is probably meant."""
    for text in config.rollout.stop:
        if found := _ESCAPE.search(text):
            yield UserError(
                f"rollout.stop has a text with a backslash before {found[0][1]!r}: {text}",
                where="rollout.stop",
                why="only double quotes of YAML make a line break or a tab of both, and responses may never have them",
                fix=f'write "{text}" in double quotes, unless responses have the backslash, as in LaTeX',
            )


def unread_paper_keys(config: Config) -> list[str]:
    """Return a sentence for each key of `IN_THE_PAPER` that was given, and has no effect.

    The config.yaml of a run gives all keys of a section, so it asks for none of them."""
    sentences = []
    for key in IN_THE_PAPER:
        section, _, leaf = key.partition(".")
        given = getattr(config, section).model_fields_set
        if leaf not in given or given == type(getattr(config, section)).model_fields.keys():
            continue
        for rule in (rule for rule in RULES if key in rule.keys):
            of_rule, _, decider = rule.decider.partition(".")
            value = getattr(getattr(config, of_rule), decider)
            if not rule.reads(value):
                sentences.append(
                    f"{key} has no effect with {rule.decider}={value}; {rule.fix} to give it one"
                )
                break
    return sentences
