"""The one exception for what a user can cause: bad config, bad data, an unusable machine.

Each error says what is wrong, where, why, and what to do about it. The command line prints it without a traceback and
exits with code 2; a library user catches `UserError`. Bugs of ours stay ordinary exceptions with their traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """An error that the user can fix: `what` is wrong and, optionally, `where`, `why` and `fix`, a line each."""

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        parts = [("", what), ("where: ", where), ("why: ", why), ("fix: ", fix)]
        super().__init__("\n  ".join(label + text for label, text in parts if text))
