"""The display of this process. `qarl.progress.screen.Display` says what the functions do.

The environment variable `QARL_PROGRESS=0` switches it off, and `QARL_PROGRESS=lines` asks for a line a minute on a
terminal, too. `trainer.progress` is the config's key, which reaches the processes of a run in verl by this variable."""

from __future__ import annotations

import os

from qarl.progress.screen import Display

VARIABLE = "QARL_PROGRESS"
OFF = "0"
LINES = "lines"

_DISPLAY = Display()
_DISPLAY.enabled = os.environ.get(VARIABLE) != OFF
_DISPLAY.lines_only = os.environ.get(VARIABLE) == LINES

phase = _DISPLAY.phase
advance = _DISPLAY.advance
clear = _DISPLAY.clear
erasure = _DISPLAY.erasure


def switch(on: bool) -> None:
    """Show something from now on, or nothing. The environment variable can forbid it."""
    _DISPLAY.enabled = on and os.environ.get(VARIABLE) != OFF


def lines_only() -> None:
    """Write a line a minute on a terminal, too: another program has its own live line there."""
    _DISPLAY.lines_only = True
