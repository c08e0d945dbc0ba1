"""A registry of objects by name, for values of the config that a plugin may add to (`qarl.plugins`)."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from qarl.errors import UserError


class Named(Protocol):
    """What a registry holds: an object with a name and the keys of the config that it alone reads."""

    @property
    def name(self) -> str: ...

    @property
    def keys(self) -> Iterable[str]: ...


_T = TypeVar("_T", bound=Named)


class Registry(Generic[_T]):
    """Objects by name. `what` and `key`: their word, and the key of the config that names one, for errors."""

    def __init__(self, what: str, key: str) -> None:
        self._what = what
        self._key = key
        self._objects: dict[str, _T] = {}

    def register(self, described: _T) -> _T:
        """Make `described` a value of the key, and return it. Raise UserError if its name belongs to another one."""
        if self._objects.setdefault(described.name, described) != described:
            raise UserError(
                f"there already is an {self._what} {described.name!r}",
                where=self._key,
                fix=f"give the {self._what} another name",
            )
        return described

    def unregister(self, name: str) -> None:
        del self._objects[name]

    def names(self) -> tuple[str, ...]:
        """Return the values of the key."""
        return tuple(self._objects)

    def get(self, name: str) -> _T:
        """Return the object called `name`, which the config has checked."""
        return self._objects[name]

    def values(self) -> tuple[_T, ...]:
        return tuple(self._objects.values())

    def reading(self, key: str) -> tuple[str, ...]:
        """Return the names of the objects that read `key`."""
        return tuple(described.name for described in self.values() if key in described.keys)


def imported(path: str) -> Any:
    """Return what "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
