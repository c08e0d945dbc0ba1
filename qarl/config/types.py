"""Types of values that several config keys share, and their checks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from qarl.config.errors import nearest
from qarl.config.ignore import pattern_problem

LONGEST_PATH, LONGEST_NAME = 4000, 240
"""Largest number of bytes in a path, and in one name between slashes. Linux allows 4095 and 255; a run appends some."""
BUILTIN_REWARDS = ("arithmetic", "math_verify")
LARGEST = 2**63 - 1
"""The largest whole number that every reader of the config can represent."""


@dataclass(frozen=True)
class Unit:
    """The unit of a key, as in `Annotated[int, Unit("tokens")]`. It is only documentation."""

    name: str


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def as_dotted(value: Any) -> Any:
    """Return a nested mapping as a flat one with dotted keys. An empty mapping stays the value of its key."""
    if not isinstance(value, Mapping):
        return value
    flat: dict[str, Any] = {}
    for key, child in value.items():
        if isinstance(child, Mapping) and child:
            flat |= {f"{key}.{rest}": one for rest, one in as_dotted(child).items()}
        else:
            flat[str(key)] = child
    return flat


def whole_text(text: str) -> str:
    """Return `text`; raise an error if it contains NUL, which ends a string in C and cannot be in a file name."""
    if "\0" in text:
        raise PydanticCustomError("nul", "contains the character NUL", {"fix": "remove it"})
    return text


def possible_path(text: str) -> str:
    """Return `text`; raise an error if the whole path, or one name between its slashes, is too long."""
    if len(os.fsencode(text)) > LONGEST_PATH or any(len(os.fsencode(p)) > LONGEST_NAME for p in text.split("/")):
        reason = f"is longer than a path may be ({LONGEST_PATH} bytes, {LONGEST_NAME} between slashes)"
        raise PydanticCustomError("path_length", "{reason}", {"reason": reason, "fix": "give a shorter path"})
    return text


def held_integer(value: Any) -> Any:
    """Return `value`; raise an error if it is a whole number of more than 64 bits."""
    if isinstance(value, int) and abs(value) > LARGEST:
        raise PydanticCustomError("too_large", "has more than 64 bits", {"fix": f"choose at most {LARGEST}"})
    return value


def reward_name(function: str) -> str:
    """Return `function`; raise an error if it is not a built-in reward and does not have the form `module:function`."""
    where, colon, name = function.rpartition(":")
    if function in BUILTIN_REWARDS or (where and name.isidentifier()):
        return function
    guess = nearest(function, BUILTIN_REWARDS)
    fix = f"did you mean {guess}? " if guess and not colon else ""
    fix += f"write {', '.join(BUILTIN_REWARDS)}, module:function or path/to/file.py:function"
    raise PydanticCustomError("reward", "neither a built-in reward nor a function", {"fix": fix})


def good_patterns(patterns: list[str]) -> list[str]:
    """Return `patterns`; raise an error if one is not a valid regular expression, or too slow (`pattern_problem`)."""
    for pattern in patterns:
        if problem := pattern_problem(pattern):
            raise PydanticCustomError("pattern", "{message}", {"message": problem[0], "fix": problem[1]})
    return patterns


Text = Annotated[str, Field(min_length=1), AfterValidator(whole_text)]
PathText = Annotated[Text, AfterValidator(possible_path)]
TextList = Annotated[list[Text], BeforeValidator(as_list)]
PathList = Annotated[list[PathText], BeforeValidator(as_list)]
Patterns = Annotated[TextList, AfterValidator(good_patterns)]
RewardName = Annotated[PathText, AfterValidator(reward_name)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Above = Annotated[float, Field(gt=0, le=1e6)]
Below = Annotated[float, Field(gt=0, le=1)]
Pair = Annotated[tuple[Fraction, Fraction], Field(strict=False)]
Dotted = Annotated[dict[str, Any], BeforeValidator(as_dotted)]
