"""The configuration of a run: its keys with types, bounds and defaults, and the code that reads YAML and arguments.

    from qarl.config import load_config

`load_config` builds a config from the command line, `build_config` from a dict. One error reports all problems. This
package does not import torch, transformers, vLLM or verl.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qarl.config.actor import ActorConfig as ActorConfig
from qarl.config.errors import ConfigError, Problem, from_pydantic, key_by_key, key_of
from qarl.config.lora import with_start
from qarl.config.optim import OptimConfig as OptimConfig
from qarl.config.read_config import read_arguments, with_home
from qarl.config.schema import Config, check_together, default_values, flat_values, sections
from qarl.config.unused_keys import dropped, named_in_vain
from qarl.errors import UserError
from qarl.plugins import load_plugins


def load_config(argv: Sequence[str]) -> Config:
    """Build the config from arguments: `config=NAME.yaml` (required) and `key.path=value` overrides, in any order.

    NAME is looked up as given, then in ./configs, then among the configs shipped with the package. Values are YAML.
    Raises `ConfigError` with all problems.
    """
    raw = read_arguments(argv, keys=default_values())
    return _build(raw.values, raw.sources, raw.problems)


def build_config(values: Mapping[str, Any]) -> Config:
    """Build the config from a nested dict, like the content of a YAML file. Raises `ConfigError` with all problems."""
    return _build(values, {}, [])


def write_resolved(config: Config, path: str | Path) -> None:
    """Write `config.resolved_yaml()` to `path`. Create missing folders. Raise `UserError` if writing fails."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config.resolved_yaml(), encoding="utf-8")
    except OSError as error:
        raise _not_writable(path, error.strerror) from error


def check_writable(run_dir: Path) -> None:
    """Raise UserError if no file can be written to the run folder, or no folder made where it will be. Nothing is
    written."""
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise _not_writable(run_dir / "config.yaml", f"{there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _not_writable(
            run_dir / "config.yaml",
            f"the folder {there}, or the disk that it is on, cannot be written to",
        )


def _not_writable(path: Path, why: str | None) -> UserError:
    fix = "set output_dir to a folder that can be written to"
    return UserError("the config cannot be written", where=str(path), why=why, fix=fix)


def describe_keys() -> dict[str, str]:
    """Return every section and every dotted key, each with its description."""
    from qarl.config.help import about_section, key_table

    about = {name: about_section(name)[0] for name in sections()}
    for keys in key_table().values():
        about |= {key.name: key.meaning for key in keys}
    return about


def _plugin_names(values: Mapping[str, Any]) -> list[str]:
    """Return the value of `plugins`, or nothing if it is not a list of texts, which the check of its type reports."""
    names = values.get("plugins")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return []
    return names


def _build(
    values: Mapping[str, Any], sources: Mapping[str, str], problems: Sequence[Problem]
) -> Config:
    # If a section is missing, its required keys are still reported one by one.
    filled = {**{name: {} for name in sections()}, **with_home(values)}
    filled["lora"] = with_start(filled["lora"])
    load_plugins(_plugin_names(filled))
    for key in dropped(flat_values(filled, set()), default_values(), sources):
        section, _, child = key.rpartition(".")
        others = {**filled[section]}
        others.pop(child, None)
        filled[section] = others
    reported = list(problems)
    bad = list[Problem]()
    try:
        config = Config.model_validate(filled)
        bad = named_in_vain(flat_values(filled, set()), default_values(), sources)
    except ConfigError as error:
        bad = error.problems
    except ValidationError as error:
        descriptions = describe_keys()
        errors = list(key_by_key(error.errors(include_url=False), descriptions))
        bad_keys = {key_of(item["loc"]).partition("[")[0] for item in errors}
        bad = [from_pydantic(item, descriptions) for item in errors] + check_together(
            flat_values(filled, bad_keys)
        )
    for problem in bad:
        key = problem.key.partition("[")[0]
        reported.append(replace(problem, source=sources.get(key)))
    if reported:
        raise ConfigError(reported)
    return config
