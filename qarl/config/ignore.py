"""Decide which Linear layers stay in high precision, in the same way for the trainer and the engine.

An entry of `ignore` is either an exact module name, or `re:` and a regular expression. An expression matches a name if
it matches its start (`re.match`). So `re:.*mlp.gate` also matches `model.layers.0.mlp.gate_proj`. To match only the
router, write `re:.*mlp[.]gate$`.
compressed-tensors (`match_name`) and vLLM (`should_ignore_layer`, for layers that are not fused) match names in the
same way. compressed-tensors also matches class names such as `Linear`. vLLM and QaRL do not.

Python's `re` may try every way in which a pattern can match a name, without a time limit. With `re:(a+)+$` and a long
name this would practically never end. So a pattern with too many ways to match is refused.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from qarl.errors import UserError

REGEX_PREFIX = "re:"
WAYS_OF_A_STAR = 40
"""Estimated number of ways in which one `.*` can match. It suits patterns with four or five `.*` and names of 100
letters."""
MOST_WAYS = 1e7
"""Patterns with more ways to match are refused. In the worst case, matching one name takes milliseconds with four `.*`,
a tenth of a second with five, and years with a nested repetition."""

_parser: Any = importlib.import_module("re._parser")
"""The private parser of `re`. A different parser could miss syntax that `re` supports, such as verbose mode."""


class ResolvedIgnore(NamedTuple):
    """The layers to quantize, the layers that stay in high precision, and the entries of `ignore` without a match."""

    quantized: list[str]
    ignored: list[str]
    unmatched: list[str]


def is_ignored(name: str, ignore: Iterable[str]) -> bool:
    """Return whether the module `name` stays in high precision. Raise UserError if an entry is a bad pattern."""
    return any(_matches(name, entry) for entry in ignore)


def resolve_ignored(linear_names: Iterable[str], ignore: Sequence[str]) -> ResolvedIgnore:
    """Split `linear_names` by `ignore` and keep their order. The caller must warn about entries in `unmatched`."""
    names = list(linear_names)
    hits = {entry: {name for name in names if _matches(name, entry)} for entry in ignore}
    taken: set[str] = set().union(*hits.values())
    return ResolvedIgnore(
        quantized=[name for name in names if name not in taken],
        ignored=[name for name in names if name in taken],
        unmatched=[entry for entry, matched in hits.items() if not matched],
    )


@lru_cache(maxsize=256)
def pattern_problem(entry: str) -> tuple[str, str] | None:
    """Return (problem, fix) of an `ignore` entry, or None if the entry is a plain name or a good pattern."""
    if not entry.startswith(REGEX_PREFIX):
        return None
    pattern = entry.removeprefix(REGEX_PREFIX)
    try:
        re.compile(pattern)
        ways = _log_ways(_parser.parse(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        fix = "correct the pattern, or remove re: to use it as an exact module name"
        return f"{entry} is not a regular expression: {error}", fix
    if ways <= math.log(MOST_WAYS):
        return None
    what = f"{entry} can match in too many ways, so Python's re may never finish on the name of a layer"
    return what, "replace nested repetitions with .* and use at most four .* in one pattern"


def _log_ways(items: Iterable[tuple[Any, Any]]) -> float:
    """Return the log of a rough upper bound on the ways in which a parsed pattern can match the start of a name."""
    total = 0.0
    for operation, argument in items:
        if str(operation).endswith("_REPEAT"):
            least, most, repeated = argument
            most = min(int(most), WAYS_OF_A_STAR)
            total += math.log(max(most - least + 1, 1)) + most * _log_ways(repeated)
        elif str(operation) == "BRANCH":
            total += math.log(len(argument[1])) + max(map(_log_ways, argument[1]))
        else:  # groups and assertions contain patterns; everything else matches in one way
            parts = argument if isinstance(argument, tuple) else (argument,)
            total += sum(_log_ways(part) for part in parts if isinstance(part, _parser.SubPattern))
    return total


def _matches(name: str, entry: str) -> bool:
    if not entry.startswith(REGEX_PREFIX):
        return entry == name
    if problem := pattern_problem(entry):
        raise UserError(problem[0], where="quant.ignore", fix=problem[1])
    return re.match(entry.removeprefix(REGEX_PREFIX), name) is not None
