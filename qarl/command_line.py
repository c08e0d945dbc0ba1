"""How the arguments of a command are written: KEY=VALUE, without spaces around `=` and without dashes.

`check_words` is called before any command reads its arguments, so that a habit of other programs, such as
`--key value`, is one error with the corrected arguments, and not an error for each word that the shell makes of it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from qarl.errors import UserError

_OPTION = re.compile(r"--?(?P<key>[A-Za-z][\w.-]*)(?P<value>=.*)?", re.DOTALL)
_ASSIGNMENT = re.compile(r"(?P<key>\w+(\.\w+)*)=(?P<value>.*)", re.DOTALL)
_WHERE = "command line"


def check_words(words: Sequence[str]) -> None:
    """Raise UserError if there are spaces around `=`, if a key has dashes, or if a key stands twice."""
    joined = _joined(words)
    if joined != list(words):
        raise UserError(
            f"there are spaces around =: {shlex.join(words)}",
            where=_WHERE,
            why="a shell takes what stands between spaces as arguments of their own",
            fix=f"write {shlex.join(joined)}",
        )
    plain = _without_dashes(words)
    if plain != list(words):
        short = any(re.fullmatch(r"-[A-Za-z]", word) for word in words)
        example = "KEY=VALUE" if short else shlex.join(plain)
        raise UserError(
            f"arguments have no dashes: {shlex.join(words)}",
            where=_WHERE,
            why="every key is written KEY=VALUE",
            fix=f"write {example}; --help describes the keys",
        )
    _check_once(words)


def _joined(words: Sequence[str]) -> list[str]:
    """Return `words` with `key = value`, `key =value` and `key= value` each as one word."""
    joined: list[str] = []
    for word in words:
        last = joined[-1] if joined else ""
        lacks_value = re.fullmatch(r"[\w.-]+=", last) and "=" not in word and word[0:1] != "-"
        lacks_equals = word.startswith("=") and re.fullmatch(r"[\w.-]+", last)
        if lacks_value or lacks_equals:
            joined[-1] = last + word
        else:
            joined.append(word)
    return joined


def _without_dashes(words: Sequence[str]) -> list[str]:
    """Return `words` with `key=value` for each `--key=value` and `--key value`, and `key` for a `--key` alone."""
    plain: list[str] = []
    bare = ""
    for word in words:
        option = _OPTION.fullmatch(word)
        if bare and not option and "=" not in word:
            plain[-1] = f"{bare}={word}"
            bare = ""
        elif option:
            key = option["key"].replace("-", "_")
            bare = "" if option["value"] else key
            plain.append(key + (option["value"] or ""))
        else:
            plain.append(word)
            bare = ""
    return plain


def _check_once(words: Sequence[str]) -> None:
    values: dict[str, str] = {}
    for word in words:
        assignment = _ASSIGNMENT.fullmatch(word)
        if assignment is None:
            continue
        key = assignment["key"]
        value = assignment["value"]
        if key in values:
            raise UserError(
                f"{key} is given twice: {values[key]}, then {value}",
                where=_WHERE,
                fix="keep one of them",
            )
        values[key] = value
