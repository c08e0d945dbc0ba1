"""Checks whether verl finds QaRL and whether verl would run a model's code without permission. Does not import verl."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

from qarl.config import Config
from qarl.errors import UserError


def check_plugin_installed() -> None:
    """Raise UserError if verl would not find QaRL. verl needs an entry point, which only installed packages have."""
    found = importlib.metadata.entry_points(group="verl.plugins")
    if any(point.value.startswith("qarl.verl.plugin") for point in found):
        return
    raise UserError(
        "verl does not find QaRL's plugin",
        where="entry points of group verl.plugins in this Python environment",
        why="QaRL is not installed, or the metadata of an older installation is found first (for example in a folder "
        "qarl.egg-info in the working directory)",
        fix="pip install -e . (or make setup) in the checkout; delete an old qarl.egg-info",
    )


def check_no_new_trl() -> None:
    """Raise UserError if TRL is installed without the class that verl takes from it.

    verl 0.9.1 (`apply_monkey_patch` in verl/models/transformers/monkey_patch.py) imports it whenever TRL is installed.
    """
    found = importlib.util.find_spec("trl")
    folders = [Path(folder) for folder in found.submodule_search_locations or ()] if found else []
    if not folders or any((folder / "experimental" / "ppo").is_dir() for folder in folders):
        return
    version = importlib.metadata.version("trl")
    if int(version.partition(".")[0]) < 1:  # the class is at the top of the package
        return
    raise UserError(
        f"verl 0.9.1 does not run beside TRL {version}",
        where=f"the Python environment {sys.prefix}",
        why="verl imports AutoModelForCausalLMWithValueHead from TRL if it is installed, and this TRL lacks it",
        fix="uninstall trl, or use one environment for verl and another for TRL",
    )


def refuse_hidden_code(config: Config, tokenizer: Any, hf_config: Any) -> None:
    """Raise UserError if verl would run a model's code although the config forbids it.

    verl's reward workers always load the tokenizer with `trust_remote_code=True` (reward_loop.py of 0.9.1). So they
    run the code in a model folder even if transformers does not need it.
    """
    named = [getattr(hf_config, "auto_map", None), getattr(tokenizer, "init_kwargs", {}).get("auto_map")]
    if any(named) and not config.model.trust_remote_code:
        raise UserError(
            f"the model in {config.model.path!r} contains Python code, which verl would run",
            where="model.trust_remote_code=false",
            why="verl's reward workers always load the tokenizer with trust_remote_code=True",
            fix="remove auto_map from config.json and tokenizer_config.json; or read the code, then set "
            "model.trust_remote_code=true; or set backend=local",
        )
