"""The entry point of group `verl.plugins`: verl imports this module at the end of verl's import, in every process.

Most of those processes train nothing and import no engine, so nothing heavy is imported here. What registers the loss
and the engine runs when verl has imported the module that holds the registry, through an import finder: to register at
once would be to import verl's engines into every process.

verl swallows exceptions of plugins; so what goes wrong is logged here, and stock verl continues. A config that names
something of ours then fails by its name.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLLOWERS = {
    "verl.trainer.ppo.core_algos": "qarl.verl.plugin.loss",
    "verl.workers.engine": "qarl.verl.plugin.engine",
}
"""Modules of verl's with a registry, and the module of ours that registers itself there on import."""

_log = logging.getLogger("qarl.verl.plugin")


class AfterImport(importlib.abc.MetaPathFinder):
    """Imports `followers[name]` once `name` has been imported. Finds nothing itself: the finders after it do.

    A follower stays in the table until its module has run to the end: a search alone, or an import that failed, does
    not use it up.
    """

    def __init__(self, followers: dict[str, str]) -> None:
        self.followers = dict(followers)
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.followers or getattr(self._searching, "name", None) == fullname:
            return None
        self._searching.name = fullname  # the search below comes by here again
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.name = None
        if spec is not None and spec.loader is not None and not isinstance(spec.loader, _LoaderThen):
            spec.loader = _LoaderThen(spec.loader, self.followers)
        return spec


class _LoaderThen(importlib.abc.Loader):
    """A loader; after it has run a module of the table `followers`, the module's follower is imported, once."""

    def __init__(self, loader: Any, followers: dict[str, str]) -> None:
        self._loader, self._followers = loader, followers

    def __getattr__(self, name: str) -> Any:
        if "_loader" not in self.__dict__:  # copy and pickle ask an object that has no attributes yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        follower = self._followers.pop(module.__name__, None)
        if follower is not None:
            import_quietly(follower)


def import_quietly(name: str) -> None:
    """Import a module of the plugin; an exception is logged, with its traceback, and goes no further."""
    try:
        importlib.import_module(name)
    except Exception:
        _log.error("QaRL could not register %s with verl; verl runs without it", name, exc_info=True)


def install() -> None:
    """Register what verl needs at once, and the rest for later; calling it again changes nothing."""
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
