"""A kernel of a plugin's file, for one test. A process imports a file once, so a second test registers it again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from checkout import ROOT

from qarl.kernels import registry
from qarl.kernels.base import LinearKernel
from qarl.kernels.linear_kernels import LINEAR_KERNELS
from qarl.plugins import VARIABLE, load_plugins


@contextmanager
def registered(name: str) -> Iterator[None]:
    """Register the linear kernel `name` of tests/support/plugins/NAME.py, and remove it at the end."""
    with patch.dict(os.environ, {VARIABLE: ""}):
        load_plugins([str(ROOT / f"tests/support/plugins/{name}.py")])
        if all(kernel.name != name for kernel in LINEAR_KERNELS):
            kinds = LinearKernel.__subclasses__()
            registry.register(next(k for k in kinds if getattr(k, "name", None) == name))
        try:
            yield
        finally:
            registry.unregister(name)
