"""The entry point of group `verl.plugins`: every process imports this module at the end of `import verl`.

Most of those processes train nothing and import no engine, so this module imports nothing heavy. An import finder
registers the loss and the engine as soon as verl has imported the modules that hold its registries. Registering them
here directly would import verl's engines into every process.

verl swallows the exceptions of plugins and continues without them. So this module logs its errors. A config that names
a part of QaRL then fails, because verl does not know that name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLLOWERS = {
    "verl.trainer.ppo.core_algos": "qarl.verl.plugin.loss",
    "verl.workers.engine": "qarl.verl.plugin.engine",
    "verl.trainer.ppo.v1": "qarl.verl.plugin.trainer",
    "verl.experimental.agent_loop.agent_loop": "qarl.verl.plugin.agent_loop",
}
"""Maps each verl module with a registry to the QaRL module that registers itself there on import."""

_log = logging.getLogger("qarl.verl.plugin")


class AfterImport(importlib.abc.MetaPathFinder):
    """Imports `followers[name]` after module `name` has been imported. Other finders find the module itself.

    A follower stays in the table until module `name` has been imported completely. Searching for the module or failing
    to import it does not remove the follower.
    """

    def __init__(self, followers: dict[str, str]) -> None:
        self.followers = dict(followers)
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.followers or getattr(self._searching, "name", None) == fullname:
            return None
        self._searching.name = fullname  # the search below calls this method again
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.name = None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader  # made by this search, so the change of its method concerns no other module
            loader.exec_module = functools.partial(self._run, loader.exec_module)
        return spec

    def _run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        exec_module(module)
        follower = self.followers.pop(module.__name__, None)
        if follower is not None:
            import_quietly(follower)


def import_quietly(name: str) -> None:
    """Import a module of the plugin. Log an exception with its traceback instead of raising it."""
    try:
        importlib.import_module(name)
    except Exception:
        _log.error("QaRL could not register %s with verl; verl runs without it", name, exc_info=True)


def install() -> None:
    """Register the CPU platform now, if it is chosen. Register loss and engine as soon as verl is ready for them. A
    second call has no effect."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        import_quietly("qarl.verl.plugin.platform")
    if any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        return
    later = {}
    for module, follower in FOLLOWERS.items():
        if module in sys.modules:
            import_quietly(follower)
        else:
            later[module] = follower
    sys.meta_path.insert(0, AfterImport(later))


install()
