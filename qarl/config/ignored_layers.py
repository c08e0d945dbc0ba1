"""Decide which Linear layers stay in high precision, in the same way for the trainer and the engine.

An entry of `ignore` is either an exact module name, or `re:` and a regular expression. An expression matches a name if
it matches its start (`re.match`). So `re:.*mlp.gate` also matches `model.layers.0.mlp.gate_proj`. To match only the
router, write `re:.*mlp[.]gate$`.
compressed-tensors (`match_name`) and vLLM (`should_ignore_layer`, for layers that are not fused) match names in the
same way. compressed-tensors also matches class names such as `Linear`. vLLM and QaRL do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

REGEX_PREFIX = "re:"


class ResolvedIgnore(NamedTuple):
    """The layers to quantize, the layers that stay in high precision, and the entries of `ignore` without a match."""

    quantized: list[str]
    ignored: list[str]
    unmatched: list[str]


def is_ignored(name: str, ignore: Iterable[str]) -> bool:
    """Return whether the module `name` stays in high precision."""
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


def _matches(name: str, entry: str) -> bool:
    pattern = entry.removeprefix(REGEX_PREFIX)
    return entry == name if pattern == entry else re.match(pattern, name) is not None
