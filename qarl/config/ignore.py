"""Which Linear layers stay in high precision: one matcher for the trainer and for the engine.

An entry of `ignore` is a module name, compared for equality, or `re:` and a regular expression that must match from
the start of the name (`re.match`: anchored at the front, open at the end). So `model.layers.0.mlp.gate` never takes
`model.layers.0.mlp.gate_proj` with it, and `re:.*mlp.gate` does: write `re:.*mlp[.]gate$`.
These are the semantics of `compressed_tensors.utils.match_name` and of vLLM's `should_ignore_layer` for an unfused
name. compressed-tensors also compares an entry with the names of the module's classes (an entry `Linear` ignores
every Linear); vLLM does not, so neither do we, and such an entry is reported as unmatched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from qarl.errors import UserError

REGEX_PREFIX = "re:"


class ResolvedIgnore(NamedTuple):
    """The layers to quantize, the layers left alone, and the entries of `ignore` that matched no layer at all."""

    quantized: list[str]
    ignored: list[str]
    unmatched: list[str]


def is_ignored(name: str, ignore: Iterable[str]) -> bool:
    """Whether the module called `name` is left in high precision. UserError for an entry that is no valid regex."""
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


def _matches(name: str, entry: str) -> bool:
    if not entry.startswith(REGEX_PREFIX):
        return entry == name
    try:
        return re.match(entry.removeprefix(REGEX_PREFIX), name) is not None
    except re.error as error:
        raise UserError(
            f"{entry!r} is not a valid regular expression: {error}",
            where="quant.ignore",
            fix="correct the pattern after `re:`, or write the module's exact name without `re:`",
        ) from error
