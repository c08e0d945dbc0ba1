"""Read and write the YAML of configs by the rules of YAML 1.2, and record the line number of every key.

PyYAML follows YAML 1.1, which reads `1e-4` as text, `off` and `no` as false, `0123` as octal and `12:30` as 750. Here
scalars follow YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema), except that numbers are always
decimal. Reading and writing use the same rules, so a written config reads back equal. Tags, anchors, aliases and merge
keys are refused for readability.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from qarl.config.errors import NOT_GIVEN, Problem

MOST_DIGITS = 18
"""The most digits of a whole number. Every reader of the config can represent such a number (63 bits)."""
TOO_DEEP = "lists or mappings are nested too deep"
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
    """A SafeLoader that reads scalars as YAML 1.2 does, and refuses tags, anchors, aliases and merge keys."""

    yaml_implicit_resolvers: _Resolvers = {}  # noqa: RUF012  declared as in PyYAML, but without the rules of YAML 1.1

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise ConstructorError(None, None, f"aliases (*{event.anchor}) are not used in configs", mark)
        if tag := getattr(event, "tag", None):
            raise ConstructorError(None, None, f"tags ({tag}) are not used in configs", mark)
        if anchor := getattr(event, "anchor", None):
            raise ConstructorError(None, None, f"anchors (&{anchor}) are not used in configs", mark)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == "<<" and key.style is None:
                raise ConstructorError(None, None, "merge keys (<<) are not used in configs", key.start_mark)
        return node

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > MOST_DIGITS:
            problem = f"a number of {len(node.value)} digits is too large"
            raise ConstructorError(None, None, problem, node.start_mark)
        return int(node.value)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text only if `_Loader` would otherwise read it as a different type."""

    yaml_implicit_resolvers: _Resolvers = {}  # noqa: RUF012  as above

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    for _tag, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_decimal)


def parse_value(text: str) -> Any:
    """Parse one YAML value, as written after `key=`. Raises `yaml.YAMLError`; `explain` returns its message."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ConstructorError(None, None, TOO_DEEP, None) from None


def dump(values: dict[str, Any]) -> str:
    """Return `values` as block-style YAML that reads back equal, with keys in the same order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


def explain(error: yaml.YAMLError) -> str:
    """Return PyYAML's message as one line, without its file name and excerpt."""
    parts = [getattr(error, "context", None), getattr(error, "problem", None)]
    return ", ".join(part for part in parts if part) or str(error).splitlines()[0]


@dataclass
class YamlFile:
    """The content of a config file: nested values, `sources` (dotted key to `file:line`), and problems of the YAML.

    `values` is None if no usable mapping was found.
    """

    path: Path
    values: dict[str, Any] | None = None
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_file(path: Path) -> YamlFile:
    """Read a config file. Bad input does not raise; it is listed in `problems` of the result."""
    file = YamlFile(path)
    lines: list[str] = []
    try:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        loader = _Loader(text)
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            file.values = _mapping(root, "", loader, file)
        else:
            _refuse(file, "the file is empty" if root is None else "the top level is not a mapping", root)
    except OSError as error:
        file.problems.append(_unreadable(path, f"cannot be read: {error.strerror}", "check its permissions"))
    except UnicodeDecodeError as error:
        file.problems.append(_unreadable(path, f"is not UTF-8 text: {error.reason}", "save it as UTF-8"))
    except RecursionError:
        file.values = None
        file.problems.append(_unreadable(path, f"is not valid YAML: {TOO_DEEP}", "write plain keys and values"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        number = mark.line if mark else 0
        line = lines[number] if number < len(lines) else NOT_GIVEN
        fix = "correct this line, or the one before it"
        file.problems.append(Problem(f"{path}:{number + 1}", line, f"not valid YAML: {explain(error)}", fix))
    return file


def _unreadable(path: Path, what: str, fix: str) -> Problem:
    return Problem("config", str(path), f"the file {what}", fix)


def _refuse(file: YamlFile, reason: str, root: yaml.Node | None) -> None:
    where = str(file.path) if root is None else f"{file.path}:{root.start_mark.line + 1}"
    value = NOT_GIVEN if root is None else "a list" if isinstance(root, yaml.SequenceNode) else root.value
    file.problems.append(Problem(where, value, reason, "write keys and values, one `key: value` per line"))


def _mapping(node: yaml.MappingNode, prefix: str, loader: _Loader, file: YamlFile) -> dict[str, Any]:
    """Read a mapping without PyYAML's constructor, which accepts duplicate keys and does not keep line numbers."""
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConstructorError(None, None, "a key must be text", key_node.start_mark)
        key, source = f"{prefix}{key_node.value}", f"{file.path}:{key_node.start_mark.line + 1}"
        if key_node.value in values:
            value = loader.construct_object(value_node, deep=True)
            reason = f"given twice, first at {file.sources[key]}"
            file.problems.append(Problem(key, value, reason, "keep one of them", source))
            continue
        file.sources[key] = source
        if isinstance(value_node, yaml.MappingNode):
            values[key_node.value] = _mapping(value_node, f"{key}.", loader, file)
        else:
            values[key_node.value] = loader.construct_object(value_node, deep=True)
    return values
