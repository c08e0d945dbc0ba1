"""The error of the config reader. It lists all problems, each with key, value, reason and fix.

Pydantic finds all invalid keys in one pass, but says only what a value should be. This module converts each of its
errors to a `Problem` that also says where the value came from, what the key means and what to write instead.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from qarl.config.other_names import counterpart
from qarl.errors import UserError

NOT_GIVEN = "(not given)"
"""The value of a key that was not given, compared by identity. An explicit `null` is a value, too."""
NO_KEY = "(no key)"
"""The value where the problem is that of a whole file, line or argument, compared by identity."""


@dataclass(frozen=True)
class Problem:
    """One problem in the configuration.

    `key` is the dotted key, and `value` the given value or `NOT_GIVEN`. A problem of a whole file, line or argument has
    its name as `key`, and `NO_KEY` as `value`.
    `source` is `file:line` or `command line`, if known. `about` says what the key means.
    """

    key: str
    value: Any
    reason: str
    fix: str
    source: str | None = None
    about: str | None = None

    def __str__(self) -> str:
        value = f" = {show(self.value)}"
        if self.value is NOT_GIVEN or self.value is NO_KEY:
            value = f": {NOT_GIVEN}" if self.value is NOT_GIVEN else ""
        origin = f"  ({self.source})" if self.source else ""
        about = f"\n  about: {self.about}" if self.about else ""
        return f"{self.key}{value}{origin}\n  reason: {self.reason}{about}\n  fix: {self.fix}"


class ConfigError(UserError):
    """All problems of a configuration, listed in `problems`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n\n".join([f"{count} in the configuration", *map(str, self.problems)]))


def show(value: Any, limit: int = 120) -> str:
    """Return `value` as one line of YAML, cut to `limit` characters."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= limit else text[: limit - 3] + "..."


CLOSE = 0.8
"""Smallest similarity (difflib's ratio) at which a name counts as another one with a typing error. At difflib's own
0.6, `truncation` would be a typing error of `function`."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most similar to `name`, or None if no candidate is similar enough."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=CLOSE)
    return matches[0] if matches else None


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Return the known dotted key or section whose last part is most similar to that of `key`, or None."""
    by_leaf: dict[str, str] = {}
    for path in known:
        by_leaf.setdefault(path.rpartition(".")[2], path)
    guess = nearest(key.rpartition(".")[2], by_leaf)
    return by_leaf[guess] if guess else None


def key_by_key(errors: Iterable[ErrorDetails], known: Iterable[str]) -> Iterator[ErrorDetails]:
    """Yield `errors`, with one error for each key of an unknown section.

    A section whose own name has a typing error stays one error, unless another library has its keys."""
    for error in errors:
        leaves = list(_leaves(error)) if error["type"] == "extra_forbidden" else [error]
        is_of_another = any(counterpart(key_of(leaf["loc"])) for leaf in leaves)
        whole = nearest_key(key_of(error["loc"]), known) and not is_of_another
        yield from [error] if whole else leaves


def _leaves(error: ErrorDetails) -> Iterator[ErrorDetails]:
    values = error["input"]
    if not isinstance(values, Mapping) or not values:
        yield error
        return
    for name, value in values.items():
        child: ErrorDetails = {**error, "loc": (*error["loc"], str(name)), "input": value}
        yield from _leaves(child)


def from_pydantic(error: ErrorDetails, descriptions: Mapping[str, str]) -> Problem:
    """Convert one of pydantic's errors to a `Problem`. `descriptions`: dotted key or section -> its meaning."""
    key = key_of(error["loc"])
    value = error["input"]
    kind = error["type"]
    plain_key = key.partition("[")[0]
    if kind == "missing":
        value = NOT_GIVEN
        reason = "required"
        fix = f"add it to the YAML file, or write {key}=VALUE on the command line"
    elif kind == "extra_forbidden":
        reason, fix = _unknown(key, descriptions)
    elif kind == "model_type":
        reason = "the section has no keys" if value is None else "a section must be keys and values"
        fix = (
            f"write its keys below it, each indented, or {key}.KEY=VALUE on the command line; "
            f"`qarl train --help {plain_key}` describes them"
        )
    elif kind == "bool_type":
        reason, fix = _no_boolean(value, plain_key)
    else:
        reason = error["msg"].replace("Input should be ", "must be ")
        reason = reason[:1].lower() + reason[1:]
        fix = error.get("ctx", {}).get(
            "fix", f"correct the value; `qarl train --help {plain_key}` describes the key"
        )
    return Problem(key, value, reason, fix, about=descriptions.get(plain_key))


YAML_1_1_BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
"""Words that YAML 1.2 reads as text, and YAML 1.1 as true or false."""


def meant_boolean(value: Any) -> str | None:
    """Return `true` or `false` if `value` is a text that YAML 1.1 would have read as that, otherwise None."""
    return YAML_1_1_BOOLEANS.get(value.lower()) if isinstance(value, str) else None


def _no_boolean(value: Any, key: str) -> tuple[str, str]:
    meant = meant_boolean(value)
    if meant is None:
        return (
            "must be true or false",
            f"write true or false; `qarl train --help {key}` describes it",
        )
    return f"must be true or false; {value} is a text in YAML 1.2", f"write {meant}"


def _unknown(key: str, known: Mapping[str, str]) -> tuple[str, str]:
    other = counterpart(key)
    if other is not None and other.key in known:
        return "unknown key", f"did you mean {other.key}? {other.sentence}"
    section = key.rpartition(".")[0]
    names = [path for path in known if path.rpartition(".")[0] == section]
    guess = nearest_key(key, known)
    listing = (
        f" (known here: {', '.join(name.rpartition('.')[2] for name in names)})" if names else ""
    )
    return "unknown key", f"did you mean {guess}?{listing}" if guess else f"remove it{listing}"


def key_of(loc: Sequence[int | str]) -> str:
    """Return pydantic's location as a dotted key: ("trainer", "logger", 0) becomes `trainer.logger[0]`."""
    key = ""
    for part in loc:
        key += f"[{part}]" if isinstance(part, int) else f"{'.' if key else ''}{part}"
    return key


def bad(v: Mapping[str, Any], key: str, reason: str, fix: str) -> Problem:
    """Return the problem that the value of `key` has."""
    return Problem(key, v[key], reason, fix)


def items(value: Any) -> list[Any]:
    """Return the entries of a list, or a single value as one."""
    return list(value) if isinstance(value, list | tuple) else [value]
