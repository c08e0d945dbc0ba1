"""Read the YAML file that the command line names, and apply the overrides. The result is an unchecked nested dict.

Bad input does not raise here. All problems are collected, so that a single error can list them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from qarl.config.errors import NOT_GIVEN, Problem, nearest
from qarl.config.strict_yaml import explain, parse_value, read_file

COMMAND_LINE = "command line"


@dataclass
class RawConfig:
    """Nested values that are not checked yet. `sources` maps dotted keys to `file:line` or `command line`.

    `file_read` is False if there is no usable file. In that case, missing keys are not reported."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    file_read: bool = False


def read_arguments(argv: Sequence[str], single_keys: Collection[str]) -> RawConfig:
    """Read `argv`, such as `["config=quickstart.yaml", "quant.scheme=bf16"]`, into raw values with overrides applied.

    `single_keys`: the known dotted keys that have no keys below them."""
    raw = RawConfig()
    arguments = _split_arguments(argv, raw.problems)
    path = _config_path(arguments.pop("config", None), raw.problems)
    if path is not None:
        file = read_file(path)
        raw.problems += file.problems
        if file.values is not None:
            raw.values, raw.sources, raw.file_read = file.values, file.sources, True
    for key, text in arguments.items():
        _apply_override(key, text, single_keys, raw)
    return raw


def with_home(value: Any) -> Any:
    """Return `value` with the home folder in place of a leading `~/`, which a shell leaves in `key=~/folder`."""
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith("~/") else value
    if isinstance(value, Mapping):
        return {key: with_home(item) for key, item in value.items()}
    return [with_home(item) for item in value] if isinstance(value, list) else value


def shipped_configs() -> Path | None:
    """Return the folder of shipped configs. It is inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    if (package / "configs").is_dir():
        return package / "configs"
    beside = package.parent / "configs"
    # Without the second condition, an installed QaRL could use site-packages/configs of a different package.
    return beside if beside.is_dir() and (package.parent / "pyproject.toml").is_file() else None


def find_config(name: str) -> tuple[Path | None, list[Path]]:
    """Return the file that `config=NAME` means (or None), and all paths that were tried, in order.

    NAME is tried as given, then in ./configs, then among the shipped configs. An absolute NAME is tried only as given.
    """
    given = Path(os.path.expanduser(name))
    candidates = [given] if given.is_absolute() else [given, *(folder / given for folder in _folders())]
    return next((path for path in candidates if os.path.isfile(path)), None), candidates


def available_configs() -> list[str]:
    """Return the sorted names of configs that `config=` finds in ./configs and among the shipped configs."""
    return sorted({path.relative_to(folder).as_posix() for folder in _folders() for path in folder.rglob("*.yaml")})


def _folders() -> list[Path]:
    shipped = shipped_configs()
    return [Path("configs"), *([shipped] if shipped else [])]


def _config_path(name: str | None, problems: list[Problem]) -> Path | None:
    available = available_configs()
    listing = f"available: {', '.join(available) or 'none'}"
    if name is None:
        problems.append(Problem("config", NOT_GIVEN, "a run needs a config file", f"add config=NAME.yaml; {listing}"))
        return None
    path, tried = find_config(name)
    if path is None:
        guess = nearest(Path(name).name, available, cutoff=0.4)
        hint = f"did you mean config={guess}? " if guess else ""
        reason = f"no such file; looked for {', '.join(map(str, tried))}"
        problems.append(Problem("config", name, reason, hint + listing, COMMAND_LINE))
    return path


def _split_arguments(argv: Sequence[str], problems: list[Problem]) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for argument in argv:
        key, equals, text = argument.partition("=")
        if not equals or not all(re.fullmatch(r"\w+", part) for part in key.split(".")):
            fix = "write key=value, for example quant.scheme=bf16"
            if argument.startswith("-"):
                fix += ", without leading dashes; --help describes the keys"
            elif argument.endswith((".yaml", ".yml")):
                fix = f"write config={argument}"
            problems.append(Problem(argument, NOT_GIVEN, "not of the form key=value", fix, COMMAND_LINE))
        elif key in arguments:
            reason = f"given twice on the command line: {arguments[key]}, then {text}"
            problems.append(Problem(key, text, reason, "keep one of them", COMMAND_LINE))
        else:
            arguments[key] = text
    return arguments


def _apply_override(key: str, text: str, single_keys: Collection[str], raw: RawConfig) -> None:
    def refuse(reason: str, fix: str) -> None:
        raw.problems.append(Problem(key, text, reason, fix, COMMAND_LINE))

    try:
        value = parse_value(text)
    except yaml.YAMLError as error:
        refuse(f"not a YAML value: {explain(error)}", f"quote it, inside the shell's quotes too: '{key}=\"...\"'")
        return
    if isinstance(value, dict):
        refuse("an override sets one key, not a mapping", f"set each key by itself: {key}.NAME=VALUE")
        return
    *sections, leaf = key.split(".")
    node = raw.values
    for depth, section in enumerate(sections, start=1):
        path = ".".join(sections[:depth])
        if path in single_keys or not isinstance(node.get(section, {}), dict):
            refuse(f"{path} is a single value and has no keys below it", f"write {path}=VALUE, or correct the path")
            return
        node = node.setdefault(section, {})
        raw.sources.setdefault(path, COMMAND_LINE)
    node[leaf] = value
    raw.sources[key] = COMMAND_LINE
