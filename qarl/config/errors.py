"""The error of the config reader. It lists all problems, each with key, value, reason and fix.

Pydantic finds all invalid keys in one pass, but says only what a value should be. This module converts each of its
errors to a `Problem` that also says where the value came from, what the key means and what to write instead.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from qarl.errors import UserError


class _NotGiven:
    """The type of `NOT_GIVEN`, the value of a key that was not given. An explicit `null` is a given value."""

    def __repr__(self) -> str:
        return "(not given)"


NOT_GIVEN = _NotGiven()


@dataclass(frozen=True)
class Problem:
    """One problem in the configuration.

    `key` is the dotted key, or the whole argument if it has no key. `value` is the given value or `NOT_GIVEN`.
    `source` is `file:line` or `command line`, if known. `about` says what the key means.
    """

    key: str
    value: Any
    reason: str
    fix: str
    source: str | None = None
    about: str | None = None

    def __str__(self) -> str:
        given = f": {self.value!r}" if self.value is NOT_GIVEN else f" = {show(self.value)}"
        origin = f"  ({self.source})" if self.source else ""
        about = f"\n  about: {self.about}" if self.about else ""
        return f"{self.key}{given}{origin}\n  reason: {self.reason}{about}\n  fix: {self.fix}"


class ConfigError(UserError):
    """All problems of a configuration, listed in `problems`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n\n".join([f"{count} in the configuration", *map(str, self.problems)]))


def show(value: Any, limit: int = 120) -> str:
    """Return `value` as one line of YAML, cut to `limit` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most similar to `name`, or None if no candidate is similar enough."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Return the known dotted key that was most likely meant by `key`, or None.

    The candidates are, in this order: a key with exactly this name in a different section, a similar name in the same
    section, and a similar name in any section.
    """
    section, _, leaf = key.rpartition(".")
    by_leaf: dict[str, str] = {}
    siblings = []
    for path in known:
        parent, _, name = path.rpartition(".")
        by_leaf.setdefault(name, path)
        if parent == section:
            siblings.append(name)
    if leaf in by_leaf:
        return by_leaf[leaf]
    if sibling := nearest(leaf, siblings):
        return f"{section}.{sibling}" if section else sibling
    other = nearest(leaf, by_leaf, cutoff=0.75)
    return by_leaf[other] if other else None


_EXPECTED = {
    "int_type": ("a whole number", "write digits only, for example 8"),
    "float_type": ("a number", "write a number without quotes, for example 0.001 or 1e-3"),
    "bool_type": ("true or false", "write true or false, without quotes"),
    "string_type": ("text", "write text; put it in quotes if it reads as a number, true, false or null"),
    "list_type": ("a list", "write a list, for example [first, second]"),
    "tuple_type": ("a list", "write a list, for example [0.9, 0.999]"),
    "finite_number": ("a finite number", "write a number that is neither .inf nor .nan"),
    "greater_than": ("above {gt}", "choose a value above {gt}"),
    "greater_than_equal": ("at least {ge}", "choose a value of {ge} or more"),
    "less_than": ("below {lt}", "choose a value below {lt}"),
    "less_than_equal": ("at most {le}", "choose a value of {le} or less"),
    "too_short": ("a list of at least {min_length}", "name at least {min_length}"),
    "too_long": ("a list of at most {max_length}", "remove the rest"),
    "string_pattern_mismatch": ("of the form {pattern}", "remove the characters that this form does not allow"),
    "string_too_long": ("text of at most {max_length} characters", "shorten it"),
    "string_too_short": ("text that is not empty", "write a value, or remove the key"),
}


def from_pydantic(error: ErrorDetails, descriptions: Mapping[str, str], sources: Mapping[str, str]) -> Problem:
    """Convert one of pydantic's errors to a `Problem`.

    `descriptions`: dotted key or section -> its meaning. `sources`: dotted key -> the place where it was written."""
    key, value, kind = key_of(error["loc"]), error["input"], error["type"]
    plain_key = key.partition("[")[0]
    context = error.get("ctx", {})
    if kind == "missing" and key != plain_key:
        key, reason, fix = plain_key, "too few values", "write every value of the list"
    elif kind == "missing":
        value = NOT_GIVEN
        reason, fix = "required", f"add it to the YAML file, or write {key}=VALUE on the command line"
    elif kind == "extra_forbidden":
        reason, fix = _unknown(key, descriptions)
    elif kind == "model_type":
        first = next(path for path in descriptions if path.startswith(f"{key}."))
        reason = "this is a section, which contains keys and has no value"
        fix = f"set its keys one by one ({first} and so on), or leave {key} out to use their defaults"
    elif kind == "literal_error":
        options = [option.strip("'") for option in context["expected"].replace(" or ", ", ").split(", ")]
        guess = nearest(str(value), options, cutoff=0.5)
        only = options[0] if len(options) == 1 else f"one of {', '.join(options)}"
        reason, fix = f"must be {only}", f"write {guess or only}"
    elif kind in _EXPECTED:
        must_be, fix = (text.format(**context) for text in _EXPECTED[kind])
        reason = f"must be {must_be}"
    else:
        message = error["msg"]
        reason = message[:1].lower() + message[1:]
        fix = context.get("fix", "give a value that fits the meaning of the key")
    return Problem(key, value, reason, fix, sources.get(plain_key), descriptions.get(plain_key))


def _unknown(key: str, known: Mapping[str, str]) -> tuple[str, str]:
    section = key.rpartition(".")[0]
    names = [path for path in known if path.rpartition(".")[0] == section]
    guess = nearest_key(key, known)
    listing = f"known here: {', '.join(name.rpartition('.')[2] for name in names)}"
    return "unknown key", f"did you mean {guess}? ({listing})" if guess else f"remove it ({listing})"


def key_of(loc: Sequence[int | str]) -> str:
    """Return pydantic's location as a dotted key: ("trainer", "logger", 0) becomes `trainer.logger[0]`."""
    key = ""
    for part in loc:
        key += f"[{part}]" if isinstance(part, int) else f"{'.' if key else ''}{part}"
    return key
