"""Kinds of values that several keys of the config share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def as_dotted(value: Any) -> Any:
    """A nested mapping as a flat one with dotted keys; empty mappings stay values."""
    if not isinstance(value, Mapping):
        return value
    flat: dict[str, Any] = {}
    for key, child in value.items():
        if isinstance(child, Mapping) and child:
            flat |= {f"{key}.{rest}": one for rest, one in as_dotted(child).items()}
        else:
            flat[str(key)] = child
    return flat


Text = Annotated[str, Field(min_length=1)]
TextList = Annotated[list[Text], BeforeValidator(as_list)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Above = Annotated[float, Field(gt=0, le=1e6)]
Below = Annotated[float, Field(gt=0, le=1)]
Pair = Annotated[tuple[Fraction, Fraction], BeforeValidator(as_tuple)]
Dotted = Annotated[dict[str, Any], BeforeValidator(as_dotted)]
