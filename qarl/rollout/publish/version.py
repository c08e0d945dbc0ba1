"""The version of a publish: a whole number from 0, as a rule the number of training steps.

Every response carries the version of the weights that it was sampled from, by which a trainer tells how old it is. An
engine that has no version is stale, so None cannot be one. A version may be lower than the last one, because a trainer
may have been restarted, or another training may use the engine, but that is said.
"""

from __future__ import annotations

import operator
from typing import Any

from qarl.console import note
from qarl.errors import UserError


def checked_version(version: Any) -> int:
    """Return `version` as an int. Raise UserError if it is not a whole number from 0."""
    try:
        number = -1 if isinstance(version, bool) else operator.index(version)
    except TypeError:
        number = -1
    if number < 0:
        raise UserError(
            f"a publish cannot have the version {version!r}",
            where="version",
            why="it must be a whole number from 0, which each response of the engine then carries",
            fix="count the training steps: version=step",
        )
    return number


def note_older(version: int, before: int | None) -> None:
    """Say it if the engine had a higher version `before`. None: it had no version."""
    if before is not None and version < before:
        note(
            f"the rollout engine had version {before} and gets version {version}; responses to come count as older"
        )
