"""The first error that says to a user what ended a run, kept in the process of Ray that raised it.

verl logs what an agent loop or a reward raises, and counts the prompt as failed, without its cause. The sampler, which
then ends the run, asks these processes for the cause (`qarl.verl.ask_servers.first_refusal`).
"""

from __future__ import annotations

from typing import Any

from qarl.errors import UserError

_errors: list[UserError] = []


def keep(error: UserError) -> None:
    """Remember `error`, if it is this process's first."""
    if not _errors:
        _errors.append(error)


def first_error(worker: Any) -> dict[str, str | None] | None:
    """Return the parts of the first error of this process, or None.

    `worker`: the Ray actor, which Ray passes to a function that it calls in its process."""
    if not _errors:
        return None
    error = _errors[0]
    return {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
