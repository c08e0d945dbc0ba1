"""Which Linear layers stay in high precision: one matcher for the trainer and for the engine.

An entry of `ignore` is a module name, compared for equality, or `re:` and a regular expression that must match from
the start of the name (`re.match`: anchored at the front, open at the end). So `model.layers.0.mlp.gate` never takes
`model.layers.0.mlp.gate_proj` with it, and `re:.*mlp.gate` does: write `re:.*mlp[.]gate$`.
These are the semantics of `compressed_tensors.utils.match_name` and of vLLM's `should_ignore_layer` for an unfused
name. compressed-tensors also compares an entry with the names of the module's classes (an entry `Linear` ignores
every Linear); vLLM does not, so neither do we, and such an entry is reported as unmatched.

Python's `re` tries the ways in which a pattern can match one after another and knows no time limit: `re:(a+)+$` does
not come to an end on a long name, here or in the engine. So a pattern with too many ways is refused before it is used.
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
"""Four `.*` share a name of 100 letters among them in 40^4 ways or twice that, five in 40^5."""
MOST_WAYS = 1e7
"""Four `.*` take milliseconds a name at worst, five a tenth of a second, a repetition inside of a repetition years."""

_parser: Any = importlib.import_module("re._parser")
"""`re`'s own reading of a pattern. It is not public; another would miss what `re` knows, verbose mode for one."""


class ResolvedIgnore(NamedTuple):
    """The layers to quantize, the layers left alone, and the entries of `ignore` that matched no layer at all."""

    quantized: list[str]
    ignored: list[str]
    unmatched: list[str]


def is_ignored(name: str, ignore: Iterable[str]) -> bool:
    """Whether the module called `name` is left in high precision. UserError for an entry that is no good pattern."""
    return any(_matches(name, entry) for entry in ignore)


def resolve_ignored(linear_names: Iterable[str], ignore: Sequence[str]) -> ResolvedIgnore:
    """Splits `linear_names` (in their order) by `ignore`; the caller warns about what is in `unmatched`."""
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
    """What is wrong with an entry of `ignore`, and how to mend it; None for a name and for a good pattern."""
    if not entry.startswith(REGEX_PREFIX):
        return None
    pattern = entry.removeprefix(REGEX_PREFIX)
    try:
        re.compile(pattern)
        ways = _log_ways(_parser.parse(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        fix = "correct the pattern; without re: it is taken as an exact module name"
        return f"{entry} is not a regular expression: {error}", fix
    if ways <= math.log(MOST_WAYS):
        return None
    what = f"{entry} can match in so many ways that Python's re may not come to an end on the name of a layer"
    return what, "write .* for a repetition inside of a repetition, and at most four .* in one pattern"


def _log_ways(items: Iterable[tuple[Any, Any]]) -> float:
    """Logarithm of about how many ways there are, at most, to match a parsed pattern with the beginning of a name."""
    total = 0.0
    for operation, argument in items:
        if str(operation).endswith("_REPEAT"):
            least, most, repeated = argument
            most = min(int(most), WAYS_OF_A_STAR)
            total += math.log(max(most - least + 1, 1)) + most * _log_ways(repeated)
        elif str(operation) == "BRANCH":
            total += math.log(len(argument[1])) + max(map(_log_ways, argument[1]))
        else:  # groups and assertions hold patterns; all else is one way
            parts = argument if isinstance(argument, tuple) else (argument,)
            total += sum(_log_ways(part) for part in parts if isinstance(part, _parser.SubPattern))
    return total


def _matches(name: str, entry: str) -> bool:
    if not entry.startswith(REGEX_PREFIX):
        return entry == name
    if problem := pattern_problem(entry):
        raise UserError(problem[0], where="quant.ignore", fix=problem[1])
    return re.match(entry.removeprefix(REGEX_PREFIX), name) is not None
