"""Kinds of values that several keys of the config share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError


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


def compiled(patterns: list[str]) -> list[str]:
    """Entries of `quant.ignore`: what follows `re:` is a regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            message = f"{pattern} is not a regular expression: {error}"
            fix = "correct the pattern; without re: it is taken as an exact module name"
            raise PydanticCustomError("pattern", "{message}", {"message": message, "fix": fix}) from None
    return patterns


Text = Annotated[str, Field(min_length=1)]
TextList = Annotated[list[Text], BeforeValidator(as_list)]
Patterns = Annotated[TextList, AfterValidator(compiled)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Above = Annotated[float, Field(gt=0, le=1e6)]
Below = Annotated[float, Field(gt=0, le=1)]
Pair = Annotated[tuple[Fraction, Fraction], BeforeValidator(as_tuple)]
Dotted = Annotated[dict[str, Any], BeforeValidator(as_dotted)]
