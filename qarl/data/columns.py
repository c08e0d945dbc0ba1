"""Give JSON rows the columns of a table, so that they hold what a Parquet file with the same rows holds.

In Parquet a field has the same keys and the same kind of number in every row. A key that a row lacks is null there, and
whole numbers beside numbers with decimals are floats. JSON has no such rule. Without it, a reward function that works
with one of the formats could raise KeyError with the other.

Nothing else is changed: text stays text, and a field with values of several types keeps each as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_KEYS = 256
"""An object with more different keys than this is a map, for example from file names to texts, and not a record. It
keeps only its own keys, because every row would get the keys of all others."""
DEEPEST = 100
"""Most levels of lists and objects in a row. Python copies and prints a few times as many."""
_EXACT = 2**53
"""A float cannot represent all whole numbers beyond this."""


@dataclass
class Field:
    """What all rows have in one field. `keys`: those of its objects. `items`: what its lists contain."""

    keys: dict[str, Field] = field(default_factory=dict)
    items: Field | None = None
    floats: bool = False
    others: bool = False
    """Whether there is text or a truth value, so that no type fits all values."""
    widest: int = 0
    """The largest magnitude of a whole number."""

    def observe(self, value: Any, depth: int = 0) -> None:
        """Take note of a row's value. Raise ValueError if it has more than `DEEPEST` levels."""
        if depth > DEEPEST:
            raise ValueError(f"it has more than {DEEPEST} levels of lists and objects")
        if isinstance(value, dict):
            for key, child in value.items():
                self.keys.setdefault(key, Field()).observe(child, depth + 1)
        elif isinstance(value, list):
            self.items = self.items or Field()
            for child in value:
                self.items.observe(child, depth + 1)
        elif isinstance(value, float):
            self.floats = True
        elif type(value) is int:
            self.widest = max(self.widest, abs(value))
        elif value is not None:
            self.others = True

    def fitted(self, value: Any) -> Any:
        """Return `value` with the keys and the kind of number that this field has in all rows."""
        if isinstance(value, dict):
            if len(self.keys) > MOST_KEYS:
                return {key: self.keys[key].fitted(child) for key, child in value.items()}
            return {key: child.fitted(value.get(key)) for key, child in self.keys.items()}
        if isinstance(value, list) and self.items is not None:
            return [self.items.fitted(child) for child in value]
        return float(value) if type(value) is int and self._is_decimal else value

    @property
    def _is_decimal(self) -> bool:
        return self.floats and not self.others and self.widest <= _EXACT


def as_table(rows: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Return `rows` with the same columns, and in each field the same keys, in the order of their first appearance.

    Raise ValueError for a row with too many levels."""
    row = Field()
    for number, values in enumerate(rows):
        try:
            row.observe(values)
        except ValueError as error:
            raise ValueError(f"row {number} cannot be used: {error}") from error
    return [row.fitted(values) for values in rows]
