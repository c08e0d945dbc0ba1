"""Checks whether verl finds QaRL and whether verl would run a model's code without permission. Does not import verl."""

from __future__ import annotations

import importlib.metadata
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
