"""Describe every config key: its meaning, values, unit and default, read from the schema.

`config_help` makes the text of `qarl train --help`. scripts/config_page.py writes the same facts to
docs/lookup/config_reference.md, from `key_table`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qarl.config.errors import nearest_key, show
from qarl.config.read_config import available_configs, find_config
from qarl.config.schema import Config, sections
from qarl.config.types import Section, Unit
from qarl.errors import UserError

_KINDS = {"boolean": "true or false", "string": "text", "object": "keys and values"}
_SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


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
    return {"": _keys(Config)} | {
        name: _keys(section, f"{name}.") for name, section in sections().items()
    }


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
    guess = nearest_key(topic, [*sections(), *keys])
    fix = f"{f'did you mean {guess}? ' if guess else ''}the sections are {', '.join(sections())}"
    raise UserError(f"there is no section or key {topic!r}", where="--help", fix=fix)


def _described(key: Key) -> str:
    return f"  {key.name}\n      {key.meaning}\n      {key.facts}"


def _keys(section: type[Section], prefix: str = "") -> list[Key]:
    """Return the keys of a section. Their values are described by pydantic's JSON schema."""
    described = section.model_json_schema()["properties"]
    keys = []
    for name, info in section.model_fields.items():
        if name in sections() and not prefix:
            continue
        unit = next((item.name for item in info.metadata if isinstance(item, Unit)), "")
        default_value = info.get_default(call_default_factory=True)
        default = (
            ""
            if info.is_required()
            else default_value
            if isinstance(default_value, str)
            else show(default_value)
        )
        meaning = " ".join((info.description or "").split())
        keys.append(Key(f"{prefix}{name}", meaning, _values(described[name]), unit, default))
    return keys


def _values(schema: Mapping[str, Any]) -> str:
    """Describe in words the values that a JSON schema allows."""
    if "anyOf" in schema:
        return ", or ".join(map(_values, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("words", schema["type"])
    if kind == "array" and "prefixItems" in schema:
        return f"list of {schema['maxItems']}, each: {_values(schema['prefixItems'][0])}"
    if kind == "array":
        items = _values(schema["items"]).removeprefix("one of ")
        least = f", at least {schema['minItems']}" if "minItems" in schema else ""
        return f"list of {'paths' if items == 'path' else items}{least}"
    bounds = [f"{sign} {_number(schema[name])}" for name, sign in _SIGNS.items() if name in schema]
    limit = f" of at most {schema['maxLength']} characters" if "maxLength" in schema else ""
    return " ".join([_KINDS.get(kind, kind) + limit, ", ".join(bounds)]).strip()


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"
