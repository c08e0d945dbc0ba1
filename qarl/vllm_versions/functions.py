"""Check that vLLM's functions still take the arguments that QaRL passes by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from qarl.errors import UserError
from qarl.vllm_versions import READ

Functions = Mapping[tuple[str, str], tuple[str, ...]]
"""(module, function) -> the parameters that are passed by name. The function may be a member, as in `LLM.sleep`. For
anything that is not called there are no parameters."""
_MISSING = object()


def changed_functions(functions: Functions) -> tuple[str, ...]:
    """Return one message for each of `functions` that the installed vLLM does not have, or that lacks a listed
    parameter.
    """
    found = []
    for (module, name), parameters in functions.items():
        function = _find(module, name)
        if function is _MISSING:
            found.append(f"no {name}")
        elif parameters and (missing := set(parameters) - inspect.signature(function).parameters.keys()):
            found.append(f"{name} without {', '.join(sorted(missing))}")
    return tuple(found)


def _find(module: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        return _MISSING
    for part in name.split("."):
        found = getattr(found, part, _MISSING)
    return found


def why_unusable(functions: Functions) -> str | None:
    """Return why a kernel that calls `functions` cannot run with the installed vLLM, or None if it can."""
    changed = changed_functions(functions)
    return f"this vLLM differs from {READ}, which QaRL supports: {'; '.join(changed)}" if changed else None


def check_functions(part: str, functions: Functions) -> None:
    """Raise UserError if the installed vLLM cannot be used by `part` of QaRL, which calls `functions`."""
    if why := why_unusable(functions):
        raise UserError(
            "QaRL does not support the installed vLLM",
            where=f"vLLM's functions for {part}",
            why=why,
            fix="install the vLLM that requirements/ locks (make setup)",
        )
