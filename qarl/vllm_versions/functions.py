"""Check that vLLM's functions still take the arguments that QaRL passes by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping

from qarl.vllm_versions import READ

Functions = Mapping[tuple[str, str], tuple[str, ...]]
"""(module, function) -> the parameters that are passed by name."""


def changed_functions(functions: Functions) -> tuple[str, ...]:
    """Return one message for each of `functions` that the installed vLLM does not have, or that lacks a listed
    parameter.
    """
    found = []
    for (module, name), parameters in functions.items():
        function = getattr(importlib.import_module(module), name, None)
        if function is None:
            found.append(f"no {name}")
        elif missing := set(parameters) - inspect.signature(function).parameters.keys():
            found.append(f"{name} without {', '.join(sorted(missing))}")
    return tuple(found)


def why_unusable(functions: Functions) -> str | None:
    """Return why a kernel that calls `functions` cannot run with the installed vLLM, or None if it can."""
    changed = changed_functions(functions)
    return f"this vLLM differs from {READ}, which QaRL supports: {'; '.join(changed)}" if changed else None
