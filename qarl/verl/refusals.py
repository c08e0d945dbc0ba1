"""Errors about verl's keys. All that is wrong with a config is said in one message, not one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from qarl.errors import UserError

Problem = tuple[Any, str, Any, Any, str]
"""Whether it is one, verl's key, its value, a good value, and why."""
Result = TypeVar("Result")


def errors_of(problems: Iterable[Problem], prefix: str = "") -> Iterator[UserError]:
    """Yield an error for each of `problems` that is one. `prefix`: what stands before verl's key in the config."""
    for wrong, key, value, good, why in problems:
        if wrong:
            yield UserError(
                f"{key}={value} cannot be used",
                where=prefix + key,
                why=why,
                fix=f"set it to {good}",
            )


def refuse(problems: Iterable[Problem], prefix: str = "") -> None:
    """Raise one UserError for all `problems`."""
    raise_all(list(errors_of(problems, prefix)))


def raise_all(errors: Sequence[UserError]) -> None:
    """Raise UserError that says all `errors`, each once. Do nothing if there are none."""
    texts = dict.fromkeys(str(error) for error in errors)
    if len(texts) == 1:
        raise errors[0]
    if texts:
        raise UserError("\n\n".join([f"{len(texts)} settings cannot be used", *texts]))


def attempt(call: Callable[[], Result], errors: list[UserError]) -> Result | None:
    """Return `call()`. If it raises, append the error to `errors` and return None.

    Hydra wraps what the constructor of a config class raises. The UserError inside is what the user needs."""
    try:
        return call()
    except Exception as error:  # whatever the constructors of verl's config classes raise
        inner: BaseException = error
        while not isinstance(inner, UserError) and inner.__cause__ is not None:
            inner = inner.__cause__
        errors.append(inner if isinstance(inner, UserError) else _verls(inner))
        return None


def _verls(error: BaseException) -> UserError:
    why = " ".join(str(error).split())[:600]
    fix = "change the keys that it names"
    return UserError(
        "verl refuses the configuration",
        where=f"{type(error).__name__} from verl",
        why=why,
        fix=fix,
    )
