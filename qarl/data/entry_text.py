"""Write an entry of a generated problem as text, and read exactly the same entry again.

A scorer compares with what its generator wrote beside a problem: tuples, objects whose keys are numbers, NumPy's
numbers, whole numbers of any size. A table has none of these: Parquet gives every row the same keys and turns tuples
into lists, and JSON has only text as keys. So a data file has the entry as one text, in JSON, in which values of other
types are objects with one key that names the type:

    (1, 2)      {"$tuple": [1, 2]}
    {1: "a"}    {"$dict": [[1, "a"]]}
    float64(1)  {"$numpy": ["float64", 1.0]}

The reader makes only values of these types, whatever the text says, so a data file cannot run code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_PLAIN = (str, int, float, bool, type(None))
_MARK = "$"
"""First character of a key that names a type. Objects that have such a key themselves are written as `$dict`."""


def to_text(value: Any) -> str:
    """Return `value` as text. Raise TypeError for a type that has no form here."""
    return json.dumps(_written(value), ensure_ascii=False)


def from_text(text: str) -> Any:
    """Return the value of which `to_text` made `text`. Raise ValueError if it did not."""
    return _read(json.loads(text))


def _written(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_written(item) for item in value]
    if kind is dict:
        return _written_dict(value)
    if kind in (tuple, set, frozenset):
        items = [_written(item) for item in value]
        if kind is not tuple:
            items.sort(key=repr)  # so that equal sets have equal texts
        return {f"{_MARK}{kind.__name__}": items}
    if kind.__module__ == "numpy":
        return _written_numpy(value)
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__} cannot be written")


def _written_dict(value: dict[Any, Any]) -> dict[str, Any]:
    if all(type(key) is str and not key.startswith(_MARK) for key in value):
        return {key: _written(item) for key, item in value.items()}
    pairs = [[_written(key), _written(item)] for key, item in value.items()]
    return {f"{_MARK}dict": pairs}


def _written_numpy(value: Any) -> dict[str, Any]:
    """Return an array as type, and nested lists of its values, and a scalar as type and value."""
    name = "ndarray" if type(value).__name__ == "ndarray" else "numpy"
    if value.dtype.hasobject:
        raise TypeError("a NumPy array of objects cannot be written")
    return {f"{_MARK}{name}": [value.dtype.str, _written(value.tolist()), list(value.shape)]}


def _numpy_scalar(parts: list[Any]) -> Any:
    import numpy

    return numpy.dtype(parts[0]).type(_read(parts[1]))


def _numpy_array(parts: list[Any]) -> Any:
    import numpy

    return numpy.array(_read(parts[1]), dtype=numpy.dtype(parts[0])).reshape(parts[2])


def _pairs(pairs: list[Any]) -> dict[Any, Any]:
    return {_read(key): _read(item) for key, item in pairs}


_READERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda items: tuple(map(_read, items)),
    "$set": lambda items: set(map(_read, items)),
    "$frozenset": lambda items: frozenset(map(_read, items)),
    "$dict": _pairs,
    "$numpy": _numpy_scalar,
    "$ndarray": _numpy_array,
}


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        key, content = next(iter(value.items()))
        if key.startswith(_MARK):
            if key not in _READERS:
                raise ValueError(f"{key} is no type that an entry can have")
            return _READERS[key](content)
    return {key: _read(item) for key, item in value.items()}
