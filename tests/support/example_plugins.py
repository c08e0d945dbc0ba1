"""Loads the plugins of examples/ for the tests of a module, and removes every trace of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from checkout import ROOT

from qarl.plugins import VARIABLE, load_plugins


@contextmanager
def loaded(**names: Callable[[], None]) -> Iterator[None]:
    """Load examples/NAME.py for each name. Its value takes back what the file registers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "")
        load_plugins([str(ROOT / f"examples/{name}.py") for name in names])
        yield
        for name, unregister in names.items():
            unregister()
            sys.modules.pop(f"qarl_plugin_{name}")
