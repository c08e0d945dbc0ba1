"""Describe every config key: its meaning, values, unit and default, read from the schema.

`config_help` makes the text of `qarl train --help`. scripts/config_page.py writes the same facts to
docs/config_reference.md, from `key_table`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from qarl.config.errors import nearest, nearest_key, show
from qarl.config.schema import Config, sections
from qarl.config.source import available_configs, find_config
from qarl.config.types import Unit, Words
from qarl.errors import UserError

_NUMBERS = {int: "integer", float: "number"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_PLURALS = {"path": "paths"}


@dataclass(frozen=True)
class Key:
    """A key of the config. `values`: its type and bounds. `unit` and `default` are "" if the key has none."""

    name: str
    meaning: str
    values: str
    unit: str
    default: str

    @property
    def facts(self) -> str:
        """Values, unit and default as one line of text."""
        unit = f"; unit: {self.unit}" if self.unit else ""
        return f"{self.values}{unit}; {f'default: {self.default}' if self.default else 'required'}"


def key_table() -> dict[str, list[Key]]:
    """Return the keys by section, in order. Keys outside any section come first, under the empty name."""
    table = {"": [_key(name, info) for name, info in Config.model_fields.items() if name not in sections()]}
    for name, section in sections().items():
        table[name] = [_key(f"{name}.{child}", info) for child, info in section.model_fields.items()]
    return table


def about_section(name: str) -> list[str]:
    """Return the paragraphs of a section's docstring; the first one is a short title."""
    paragraphs = inspect.cleandoc(sections()[name].__doc__ or "").split("\n\n")
    return [" ".join(paragraph.split()) for paragraph in paragraphs]


def shipped() -> Iterator[tuple[str, str]]:
    """Yield the name of each config that `config=` finds, and the first line of its comment."""
    for name in available_configs():
        if path := find_config(name)[0]:
            first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
            yield name, first.removeprefix("#").strip() if first.startswith("#") else ""


def config_help(about: str, topics: Sequence[str]) -> str:
    """Return the help text of a command that reads a config.

    Without `topics`, return `about` and a list of configs, sections and keys. With `topics` (names of sections or
    dotted keys), return only their full descriptions. Raise UserError if a topic is neither a section nor a key."""
    if topics:
        return "\n\n".join(_topic(topic) for topic in topics)
    lines = [about.strip(), "", "configs:", *columns(dict(shipped()))]
    lines += ["", "sections (--help SECTION describes the keys, --help SECTION.KEY one of them):"]
    table = key_table()
    for name, keys in table.items():
        title = f"{name}: {about_section(name)[0]}" if name else "top level"
        names = ", ".join(key.name.rpartition(".")[2] for key in keys)
        lines += [f"  {title}", f"      {names}"]
    return "\n".join(lines)


def columns(rows: Mapping[str, str]) -> list[str]:
    """Return names and their texts as lines of help in two columns."""
    width = max(map(len, rows), default=0) + 2
    return [f"  {name:{width}}{text}" for name, text in rows.items()]


def _topic(topic: str) -> str:
    table = key_table()
    keys = {key.name: key for keys in table.values() for key in keys}
    if topic in keys:
        return _described(keys[topic])
    if topic in table and topic:
        title, *paragraphs = about_section(topic)
        return "\n\n".join([f"{topic}: {title}", *paragraphs, *map(_described, table[topic])])
    known = [*sections(), *keys]
    guess = nearest_key(topic, known) if "." in topic else nearest(topic, sections()) or nearest_key(topic, known)
    fix = f"{f'did you mean {guess}? ' if guess else ''}the sections are {', '.join(sections())}"
    raise UserError(f"there is no section or key {topic!r}", where="--help", fix=fix)


def _described(key: Key) -> str:
    return f"  {key.name}\n      {key.meaning}\n      {key.facts}"


def _key(name: str, info: FieldInfo) -> Key:
    unit = next((item.name for item in info.metadata if isinstance(item, Unit)), "")
    given = info.get_default(call_default_factory=True)
    default = "" if info.is_required() else given if isinstance(given, str) else show(given)
    return Key(name, " ".join((info.description or "").split()), _values(info.annotation, info.metadata), unit, default)


def _values(annotation: Any, metadata: Sequence[Any]) -> str:
    """Describe the possible values of a key in words. `metadata` contains the bounds that pydantic checks."""
    metadata = [one for item in metadata for one in (item.metadata if isinstance(item, FieldInfo) else [item])]
    if get_origin(annotation) in (Union, UnionType):
        (kind,) = (one for one in get_args(annotation) if one is not NoneType)
        return f"{_values(kind, metadata)}, or null"
    if hasattr(annotation, "__metadata__"):
        return _values(annotation.__origin__, [*annotation.__metadata__, *metadata])
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(arguments)}" if len(arguments) > 1 else f"{arguments[0]} only"
    if get_origin(annotation) is list:
        least = "".join(f", at least {bound}" for bound in _bounds("min_length", metadata))
        kind = _words(metadata) or _values(arguments[0], []).removeprefix("one of ")
        return f"list of {_PLURALS.get(kind, kind)}{least}"
    if get_origin(annotation) is tuple:
        return f"list of {len(arguments)}, each: {_values(arguments[0], [])}"
    if get_origin(annotation) is dict:
        return "keys and values"
    return _single(annotation, metadata)


def _single(kind: Any, metadata: Sequence[Any]) -> str:
    if kind is bool:
        return "true or false"
    if kind in _NUMBERS:
        bounds = [f"{sign} {_number(bound)}" for name, sign in _SIGNS.items() for bound in _bounds(name, metadata)]
        return " ".join([_NUMBERS[kind], ", ".join(bounds)]).strip()
    if kind is str:
        limits = [f" of at most {bound} characters" for bound in _bounds("max_length", metadata)]
        return "".join([_words(metadata) or "text", *limits])
    raise TypeError(f"no words for values of {kind}")


def _bounds(name: str, metadata: Sequence[Any]) -> list[Any]:
    return [getattr(item, name) for item in metadata if getattr(item, name, None) is not None]


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _words(metadata: Sequence[Any]) -> str:
    return next((item.text for item in metadata if isinstance(item, Words)), "")
