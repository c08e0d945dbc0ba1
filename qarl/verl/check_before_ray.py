"""The callback of Hydra's by which verl's own command checks its config (`qarl.verl.checks`) before it starts Ray."""

from __future__ import annotations

import sys
from typing import Any

from hydra.experimental.callback import Callback

from qarl.console import note
from qarl.errors import UserError
from qarl.verl.checks import check_composed
from qarl.verl.turn_checks import turn_notes


class CheckBeforeRay(Callback):
    """Ends verl's own command with one message and exit code 2, before Ray starts, if its config is refused."""

    def on_job_start(self, config: Any, **more: Any) -> None:
        try:
            check_composed(config)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None  # Hydra turns an Exception of a callback into a warning
        for text in turn_notes(config):
            note(text)
