"""The schemes by name. A class joins them with the decorator `register`, in this package or in a user's file.

`qarl.schemes` imports all of its own modules, so a file with a decorated class is enough there.
"""

from __future__ import annotations

from typing import TypeVar

from qarl.errors import UserError
from qarl.schemes.base import Scheme
from qarl.schemes.kernel_choice import KernelChoice

_S = TypeVar("_S", bound=Scheme)
_SCHEMES: dict[str, type[Scheme]] = {}


def register(scheme: type[_S]) -> type[_S]:
    """Make `scheme` a value of quant.scheme, and return it. Raise UserError if its name belongs to another scheme."""
    known = _SCHEMES.get(scheme.name, scheme)
    same_source = (known.__module__, known.__qualname__) == (scheme.__module__, scheme.__qualname__)
    if not same_source:
        raise UserError(
            f"there already is a scheme {scheme.name!r}, {known.__module__}.{known.__qualname__}",
            where=f"{scheme.__module__}.{scheme.__qualname__}",
            fix="give the scheme another name",
        )
    _SCHEMES[scheme.name] = scheme
    return scheme


def unregister(name: str) -> None:
    """Remove the scheme called `name`."""
    del _SCHEMES[name]


def scheme_names() -> tuple[str, ...]:
    """Return the values of quant.scheme, in the order of help and errors."""
    by_order = sorted(_SCHEMES.values(), key=lambda scheme: scheme.order)
    return tuple(scheme.name for scheme in by_order)


def scheme_help() -> str:
    """Return the help of quant.scheme: what each scheme's docstring says, in the order of `scheme_names`."""
    lines = (f"`{name}`: {_first_paragraph(_SCHEMES[name])}" for name in scheme_names())
    return " ".join(lines)


def _first_paragraph(scheme: type[Scheme]) -> str:
    paragraph = (scheme.__doc__ or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def engine_scheme_names(*, quantized: bool = False) -> tuple[str, ...]:
    """Return the names of the schemes that vLLM computes with its own kernels. `quantized`: without bf16."""
    schemes = [get_scheme(name) for name in scheme_names()]
    return tuple(
        scheme.name
        for scheme in schemes
        if scheme.engine_refusal(KernelChoice.ENGINE) is None
        and (scheme.quantized or not quantized)
    )


def get_scheme(name: str, group_size: int = 128) -> Scheme:
    """Return the scheme called `name`. `group_size`: number of elements along K that share a scale, if it has groups.

    Raise UserError if there is no such scheme, or if `group_size` is used and does not fit the scheme.
    """
    scheme = _SCHEMES.get(name)
    if scheme is None:
        raise UserError(
            f"there is no scheme {name!r}",
            where="quant.scheme",
            fix=f"use one of {', '.join(scheme_names())}",
        )
    return scheme.of(group_size)
