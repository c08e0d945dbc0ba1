"""Keys that a user added to verl's config (`+key=value`) and that nothing reads.

Hydra refuses an unknown key, and proposes to add it with a `+`. An added key passes every check of Hydra's. Where verl
builds a dataclass of a section, the class refuses it, but only in the workers, minutes later. Elsewhere it is ignored:
`+lora.r=32` starts a run without adapters. verl ships its whole default config as one file, so a key that is neither
there nor in QaRL's groups was added. A section that is empty or null there is open: vLLM's arguments, for example.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from qarl.config import describe_keys
from qarl.config.errors import nearest_key
from qarl.errors import UserError

DEFAULTS = ("_generated_ppo_trainer.yaml", "model_engine/dp.yaml")
"""verl's default config as one file, and the group that it leaves out."""
QUANT = "actor_rollout_ref.actor.fsdp_config.quant"
CORRECTION = "actor_rollout_ref.actor.policy_loss.correction"
OPEN = ("ray_kwargs.ray_init", "transfer_queue", "hydra", QUANT, CORRECTION)
"""Sections with defaults of which every key is passed on. The last two are checked by their own classes."""
WRITTEN_AS = {
    "lora": f"+{QUANT}.lora={{r: 32}}, with vLLM's enable_lora (docs/do/verl.md has the whole command)",
    "quant": f"{QUANT}.KEY",
    "actor": "actor_rollout_ref.actor.KEY, or TBPO's bands as actor_rollout_ref.actor.policy_loss.KEY",
    "rollout": "actor_rollout_ref.rollout.KEY",
    "optim": "actor_rollout_ref.actor.optim.KEY",
    "model": "actor_rollout_ref.model.KEY",
    "reward": "reward.custom_reward_function.path and .name",
    "rollout_correction": f"{CORRECTION}.KEY",
}
"""Sections of QaRL's config -> how their keys are written on verl's command line."""


def unread_keys(composed: Any) -> Iterator[UserError]:
    """Yield an error for each key of verl's config `composed` that was added and that nothing reads."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(plain, Mapping)
    for key in _added(plain, _defaults(), ""):
        yield UserError(
            f"{key} has no effect",
            where=f"+{key}",
            why="verl's config has no such key, and neither verl nor QaRL reads it",
            fix=_advice(key),
        )


def _advice(key: str) -> str:
    section, _, name = key.partition(".")
    if key in describe_keys() and section in WRITTEN_AS:
        return f"write {WRITTEN_AS[section].replace('KEY', name)}"
    guess = nearest_key(key, _dotted(_defaults()))
    return f"did you mean {guess}?" if guess else "remove it"


def _added(values: Mapping[Any, Any], known: Mapping[str, Any], prefix: str) -> Iterator[str]:
    fields = _fields(str(values["_target_"])) if "_target_" in values else None
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in OPEN:
            continue
        if name in known:
            inner = known[name]
            if isinstance(value, Mapping) and isinstance(inner, Mapping) and inner:
                yield from _added(value, inner, f"{key}.")
        elif fields is not None:
            if name not in fields:
                yield from _leaves(key, value)
        elif not prefix or str(name) not in _words():
            yield from _leaves(key, value)


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, child in value.items():
            yield from _leaves(f"{key}.{name}", child)
    else:
        yield key


@cache
def _fields(target: str) -> frozenset[str] | None:
    """Return the names of the fields of a dataclass, or None if `target` names something else."""
    module, _, name = target.rpartition(".")
    kind = getattr(importlib.import_module(module), name, None)
    if not dataclasses.is_dataclass(kind):
        return None
    return frozenset(field.name for field in dataclasses.fields(kind)) | {"_target_"}


@cache
def _defaults() -> dict[str, Any]:
    """Return verl's default config and the keys of QaRL's groups, merged. Values that are not mappings do not count."""
    import verl

    folder = Path(str(verl.__file__)).parent / "trainer" / "config"
    files = [
        *(folder / name for name in DEFAULTS),
        *sorted(Path(__file__).parent.glob("qarl*/*.yaml")),
    ]
    merged: dict[str, Any] = {}
    for file in files:
        _merge(merged, yaml.safe_load(file.read_text(encoding="utf-8")))
    return merged


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Add the keys of `values`, but none to a section that is open."""
    for name, value in values.items():
        if name not in into:
            into[name] = copy.deepcopy(value)
        elif isinstance(value, Mapping) and isinstance(into[name], dict) and into[name]:
            _merge(into[name], value)


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")


@cache
def _words() -> frozenset[str]:
    """Return all words of verl's source and of QaRL's plugin. A key that is not among them is read by nothing."""
    import verl

    words: set[str] = set()
    for folder in (Path(str(verl.__file__)).parent, Path(__file__).parent):
        for file in folder.rglob("*.py"):
            words.update(re.findall(r"\w+", file.read_text(encoding="utf-8", errors="ignore")))
    return frozenset(words)
