"""Groups of Hydra for verl's own command line (docs/verl.md), and the check that they make before Ray starts."""

from __future__ import annotations

import sys
from typing import Any

from hydra.experimental.callback import Callback

from qarl.errors import UserError


class CheckBeforeRay(Callback):
    """Ends verl's command with one message and exit code 2 if `check_composed` refuses its config."""

    def on_job_start(self, config: Any, **more: Any) -> None:
        from qarl.verl.checks import check_composed

        try:
            check_composed(config)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None  # Hydra turns an Exception of a callback into a warning
