"""Read a config's YAML file and the overrides of the command line into an unchecked nested dict; write YAML.

PyYAML follows YAML 1.1, which reads `1e-4` as text, `off` and `no` as false, `0123` as octal and `12:30` as 750. Here
scalars follow YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema), except that numbers are always
decimal. Reading and writing use the same rules, so a written config reads back equal. The line number of every key is
recorded.

The error lists all problems, but only those of one stage: how the arguments are written, then which file, then its
YAML, then the values. What would follow from a problem of an earlier stage has no cause of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from qarl.config.errors import NO_KEY, NOT_GIVEN, ConfigError, Problem, nearest

COMMAND_LINE = "command line"
_Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]

_SCALARS = [
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", [*"-+0123456789"]),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
]


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads scalars as YAML 1.2 does."""

    yaml_implicit_resolvers: _Resolvers = {}  # noqa: RUF012  declared as in PyYAML, but without the rules of YAML 1.1


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text only if `_Loader` would otherwise read it as a different type."""

    yaml_implicit_resolvers: _Resolvers = {}  # noqa: RUF012  as above

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    for _tag, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))


def parse_value(text: str) -> Any:
    """Parse one YAML value, as written after `key=`. Raises `yaml.YAMLError`; `explain` returns its message."""
    return yaml.load(text, Loader=_Loader)


def dump(values: dict[str, Any]) -> str:
    """Return `values` as block-style YAML that reads back equal, with keys in the same order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


def explain(error: yaml.YAMLError) -> str:
    """Return PyYAML's message as one line, without its file name and excerpt."""
    parts = [getattr(error, "context", None), getattr(error, "problem", None)]
    return ", ".join(part for part in parts if part) or str(error).splitlines()[0]


@dataclass
class RawConfig:
    """Nested values that are not checked yet. `sources` maps dotted keys to `file:line` or `command line`."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_arguments(argv: Sequence[str], keys: Collection[str]) -> RawConfig:
    """Read `argv`, such as `["config=quickstart.yaml", "rollout.n=4"]`, into raw values with overrides applied.

    The folder of a run stands for the config in it. `keys`: those of the config, which an error may name. `problems` of
    the result are values that are no YAML. Raise ConfigError if an argument is not of the form key=value, or without a
    usable file."""
    raw = RawConfig()
    arguments = _split_arguments(argv, keys, raw.problems)
    if not raw.problems:
        path = _config_path(arguments.pop("config", None), raw.problems)
        if path is not None:
            _read_file(path, raw)
    if raw.problems:
        raise ConfigError(raw.problems)
    for key, text in arguments.items():
        _apply_override(key, text, raw)
    return raw


def _read_file(path: Path, raw: RawConfig) -> None:
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode) and root.value:
            raw.values = _mapping(root, "", loader, path, raw)
        else:
            content = "is a list" if isinstance(root, yaml.SequenceNode) else "is text"
            reason = f"the file has no keys and values: it {content if root else 'is empty'}"
            fix = "write keys and values, one `key: value` per line"
            raw.problems.append(Problem(str(path), NO_KEY, reason, fix))
    except UnicodeDecodeError as error:
        reason = f"the file is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
        fix = "give a YAML file, saved as UTF-8"
        raw.problems.append(Problem("config", str(path), reason, fix, COMMAND_LINE))
    except OSError as error:
        raw.problems.append(
            Problem("config", str(path), f"the file cannot be read: {error}", "give a YAML file")
        )
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        fix = "correct this line, or the one before it"
        if "'\\t'" in str(error):
            fix = "indent it with spaces, because YAML does not allow tabs there"
        key = f"{path}:{mark.line + 1 if mark else 1}"
        raw.problems.append(Problem(key, NO_KEY, f"not valid YAML: {explain(error)}", fix))


def _mapping(
    node: yaml.MappingNode, prefix: str, loader: _Loader, path: Path, raw: RawConfig
) -> dict[str, Any]:
    """Read a mapping without PyYAML's constructor, which accepts duplicate keys and does not keep line numbers."""
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConstructorError(None, None, "a key must be text", key_node.start_mark)
        key = f"{prefix}{key_node.value}"
        source = f"{path}:{key_node.start_mark.line + 1}"
        if key_node.value in values:
            value = loader.construct_object(value_node, deep=True)
            reason = f"given twice, first at {raw.sources[key]}"
            raw.problems.append(Problem(key, value, reason, "keep one of them", source))
            continue
        raw.sources[key] = source
        if isinstance(value_node, yaml.MappingNode):
            values[key_node.value] = _mapping(value_node, f"{key}.", loader, path, raw)
        else:
            values[key_node.value] = loader.construct_object(value_node, deep=True)
    return values


def with_home(value: Any) -> Any:
    """Return `value` with the home folder in place of a leading `~/`, which a shell leaves in `key=~/folder`."""
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith("~/") else value
    if isinstance(value, Mapping):
        return {key: with_home(item) for key, item in value.items()}
    return [with_home(item) for item in value] if isinstance(value, list) else value


def shipped_folder(name: str) -> Path | None:
    """Return the shipped folder `name`, configs or examples. It is inside an installed package, or beside the package
    in a checkout."""
    package = Path(__file__).resolve().parents[1]
    if (package / name).is_dir():
        return package / name
    beside = package.parent / name
    # Without the second condition, an installed QaRL could use site-packages/configs of a different package.
    return beside if beside.is_dir() and (package.parent / "pyproject.toml").is_file() else None


def find_config(name: str) -> tuple[Path | None, list[Path]]:
    """Return the file that `config=NAME` means (or None), and all paths that were tried, in order.

    NAME is tried as given, then in ./configs, then among the shipped configs. An absolute NAME is tried only as given.
    """
    path = Path(os.path.expanduser(name))
    candidates = [path, *(folder / path for folder in _folders() if not path.is_absolute())]
    return next((path for path in candidates if os.path.isfile(path)), None), candidates


def available_configs() -> list[str]:
    """Return the sorted names of configs that `config=` finds in ./configs and among the shipped configs."""
    return sorted(
        {
            path.relative_to(folder).as_posix()
            for folder in _folders()
            for path in folder.rglob("*.yaml")
        }
    )


def _folders() -> list[Path]:
    shipped = shipped_folder("configs")
    return [Path("configs"), *([shipped] if shipped else [])]


def _config_path(name: str | None, problems: list[Problem]) -> Path | None:
    available = available_configs()
    listing = f"available: {', '.join(available) or 'none'}"
    if name is None:
        problems.append(
            Problem(
                "config", NOT_GIVEN, "a run needs a config file", f"add config=NAME.yaml; {listing}"
            )
        )
        return None
    if not name:
        fix = f"write config=NAME.yaml; {listing}"
        problems.append(Problem("config", NOT_GIVEN, "the key has no value", fix, COMMAND_LINE))
        return None
    path, tried = find_config(name)
    if path is None:
        reason = f"no such file; looked for {', '.join(map(str, tried))}"
        fix = listing
        guess = nearest(name, [*available, *(option.removesuffix(".yaml") for option in available)])
        folder = Path(os.path.expanduser(name))
        if guess:
            fix = f"did you mean {guess.removesuffix('.yaml')}.yaml? {listing}"
        elif folder.is_dir():
            reason = "it is a folder, not a file"
            inside = folder / "config.yaml"
            fix = f"write config={inside}" if inside.is_file() else "give a YAML file"
        problems.append(Problem("config", name, reason, fix, COMMAND_LINE))
    return path


def _split_arguments(
    argv: Sequence[str], keys: Collection[str], problems: list[Problem]
) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for argument in argv:
        key, equals, text = _of_run_folder(argument).partition("=")
        if not equals or not all(re.fullmatch(r"\w+", part) for part in key.split(".")):
            problems.append(_no_assignment(argument, keys))
        elif key in arguments:
            reason = f"given twice on the command line: {arguments[key]}, then {text}"
            problems.append(Problem(key, text, reason, "keep one of them", COMMAND_LINE))
        else:
            arguments[key] = text
    return arguments


def _no_assignment(argument: str, keys: Collection[str]) -> Problem:
    """Return the problem of an argument that is not of the form key=value, with what it was probably meant to be."""
    path = Path(os.path.expanduser(argument))
    colon = re.fullmatch(r"([\w.]+):(.+)", argument)
    reason = "not of the form key=value"
    fix = "write key=value, for example config=quickstart.yaml or quant.scheme=bf16; --help describes the keys"
    if argument in keys:
        reason = "the key has no value"
        fix = f"write {argument}=VALUE"
    elif colon and colon[1] in keys:
        fix = f"write {colon[1]}={colon[2]}"
    elif path.is_dir():
        reason = "it is not the folder of a run, because it has no config.yaml"
        fix = "give the folder of a run, or config=NAME.yaml"
    elif path.suffix in (".yaml", ".yml"):
        reason = "a config is named by the key config"
        fix = f"write config={argument}"
    elif "/" in argument and "=" not in argument:
        reason = "there is no such folder of a run"
        fix = "give the folder of a run, which has a config.yaml, or config=NAME.yaml"
    value = NOT_GIVEN if argument in keys else NO_KEY
    return Problem(argument, value, reason, fix, COMMAND_LINE)


def _of_run_folder(argument: str) -> str:
    """Return `config=FOLDER/config.yaml` for the folder of a run, and any other argument unchanged."""
    config = Path(os.path.expanduser(argument)) / "config.yaml"
    return f"config={config}" if "=" not in argument and config.is_file() else argument


def _apply_override(key: str, text: str, raw: RawConfig) -> None:
    try:
        value = parse_value(text)
    except yaml.YAMLError as error:
        reason = f"not a YAML value: {explain(error)}"
        fix = f"quote it, inside the shell's quotes too: '{key}=\"...\"'"
        if text.startswith(("[", "{")):
            fix = "write [A,B] or {KEY: VALUE}, with a comma between two entries, and all of it in the shell's quotes"
        raw.problems.append(Problem(key, text, reason, fix, COMMAND_LINE))
        return
    *sections, leaf = key.split(".")
    node = raw.values
    for section in sections:
        if not isinstance(node.get(section), dict):
            node[section] = {}
        node = node[section]
    node[leaf] = value
    raw.sources[key] = COMMAND_LINE
