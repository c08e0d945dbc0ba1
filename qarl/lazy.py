"""Import the public names of a package when they are first used.

So `from qarl.rollout import RolloutEngine` works, but importing a light submodule of the package does not load torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def exporter(package: str, modules: Mapping[str, Collection[str]]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package`. `modules` maps each submodule to the public names that it defines."""

    def get(name: str) -> Any:
        for module, names in modules.items():
            if name in names:
                return getattr(importlib.import_module(f"{package}.{module}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
