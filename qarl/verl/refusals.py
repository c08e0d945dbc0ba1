"""Errors about verl's keys. All that is wrong with a config is said in one message, not one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from qarl.errors import UserError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Conflict:
    """A setting that does not go with another one, or with QaRL.

    key    verl's key
    value  its value
    good   a value that can be used, in words
    why    why `value` cannot
    """

    key: str
    value: Any
    good: Any
    why: str

    def error(self, prefix: str = "") -> UserError:
        """Return the error that says it. `prefix`: what stands before verl's key in the config."""
        return UserError(
            f"{self.key}={self.value} cannot be used",
            where=prefix + self.key,
            why=self.why,
            fix=f"set it to {self.good}",
        )


def refuse(conflicts: Iterable[Conflict]) -> None:
    """Raise one UserError for all `conflicts`."""
    raise_all([conflict.error() for conflict in conflicts])


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
