"""The base of every section of the config, and types of values that several keys share, with their checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from qarl.config.ignored_layers import REGEX_PREFIX
from qarl.errors import alternatives

BUILTIN_REWARDS = ("arithmetic", "environment", "math_verify", "reasoning_gym")
TURN_REWARDS = ("environment",)
"""Those that read the rewards of `rollout.environment`, and no answer."""


class Section(BaseModel):
    """Base of every section. It is immutable, refuses unknown keys, NaN and Inf, and does not convert types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Unit:
    """The unit of a key, as in `Annotated[int, Unit("tokens")]`. It is only documentation."""

    name: str


@dataclass(frozen=True)
class Sane:
    """A value outside `low` to `high` works, but is almost certainly a mistake (`qarl.config.checks`)."""

    low: float
    high: float


@dataclass(frozen=True)
class OneOf:
    """The values of a text that grow at run time, as in `Annotated[str, OneOf(names)]`.

    A bad value gives an error with these values.
    """

    names: Callable[[], tuple[str, ...]]

    def check(self, value: Any) -> Any:
        """Return `value`, or raise pydantic's error if it is not one of the names."""
        names = self.names()
        if value in names:
            return value
        expected = alternatives([repr(name) for name in names])
        fix = "write one of these, or name the file that registers a value of your own in plugins=[FILE.py]"
        raise PydanticCustomError(
            "name", "Input should be {expected}", {"expected": expected, "fix": fix}
        )

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.names()), "type": "string"}


@dataclass(frozen=True)
class ByName:
    """The values of a StrEnum, as in `Annotated[Level, ByName()]`: given as text, and written as text."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        texts = core_schema.literal_schema([member.value for member in source])
        as_text = core_schema.to_string_ser_schema(when_used="always")
        return core_schema.no_info_after_validator_function(source, texts, serialization=as_text)


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def as_dotted(value: Any) -> Any:
    """Return a nested mapping as a flat one with dotted keys. An empty mapping stays the value of its key."""
    if not isinstance(value, Mapping):
        return value
    flat: dict[str, Any] = {}
    for key, child in value.items():
        if isinstance(child, Mapping) and child:
            flat |= {f"{key}.{rest}": value for rest, value in as_dotted(child).items()}
        else:
            flat[str(key)] = child
    return flat


def reward_name(function: str) -> str:
    """Return `function`; raise an error if it is not a built-in reward and does not have the form `module:function`."""
    where, _, name = function.rpartition(":")
    if function in BUILTIN_REWARDS or (where and name.isidentifier()):
        return function
    fix = f"write {', '.join(BUILTIN_REWARDS)}, module:function or path/to/file.py:function"
    raise PydanticCustomError("reward", "neither a built-in reward nor a function", {"fix": fix})


def function_name(function: str) -> str:
    """Return `function`; raise an error if it does not have the form `module:function`."""
    where, _, name = function.rpartition(":")
    if where and name.isidentifier():
        return function
    fix = "write module:function or path/to/file.py:function"
    raise PydanticCustomError("function", "it names no function", {"fix": fix})


def good_patterns(patterns: list[str]) -> list[str]:
    """Return `patterns`; raise an error if one is not a valid regular expression."""
    for pattern in patterns:
        try:
            re.compile(
                pattern.removeprefix(REGEX_PREFIX) if pattern.startswith(REGEX_PREFIX) else ""
            )
        except re.error as error:
            raise PydanticCustomError(
                "pattern", f"{pattern} is not a regular expression: {error}"
            ) from error
    return patterns


def _words(text: str) -> Any:
    """Say in the help what the values of a text are."""
    return Field(json_schema_extra={"words": text})


Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
TokenId = Annotated[int, Field(ge=0)]
PathText = Annotated[Text, _words("path")]
PathList = Annotated[list[PathText], BeforeValidator(as_list)]
Patterns = Annotated[
    list[Annotated[Text, _words("module names or patterns")]],
    BeforeValidator(as_list),
    AfterValidator(good_patterns),
]
FunctionName = Annotated[Text, _words("module:function"), AfterValidator(function_name)]
RewardName = Annotated[Text, _words("name of a function"), AfterValidator(reward_name)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Above = Annotated[float, Field(gt=0, le=1e6)]
Below = Annotated[float, Field(gt=0, le=1)]
Dotted = Annotated[dict[str, Any], BeforeValidator(as_dotted)]
