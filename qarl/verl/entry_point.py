"""The entry point of group `verl.plugins`: every process imports this module at the end of `import verl`.

Most of those processes train nothing and import no engine, so this module imports nothing heavy. The loss, the engine,
the trainer, the agent loop and the server register themselves as soon as verl has imported the modules that hold its
registries. Registering them here directly would import verl's engines into every process.

verl swallows the exceptions of plugins and continues without them. So this module logs its errors. A config that names
a part of QaRL then fails, because verl does not know that name.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

import wrapt

from qarl.errors import UserError
from qarl.plugins import load_plugins_of_parent
from qarl.verl.named_files import refuse_unread_groups

FOLLOWERS = {
    "verl.trainer.ppo.core_algos": "qarl.verl.loss",
    "verl.workers.engine": "qarl.verl.fsdp_engine",
    "verl.trainer.ppo.v1": "qarl.verl.separate_trainer",
    "verl.experimental.agent_loop.agent_loop": "qarl.verl.environment_loop",
    "verl.workers.rollout.replica": "qarl.verl.adapter_server",
}
"""Maps each verl module with a registry to the QaRL module that registers itself there on import."""

_log = logging.getLogger("qarl.verl")


def import_quietly(name: str) -> None:
    """Import a module of the plugin. Log an exception with its traceback instead of raising it."""
    try:
        importlib.import_module(name)
    except Exception:
        _log.error(
            "QaRL could not register %s with verl; verl runs without it", name, exc_info=True
        )


def register_plugins() -> None:
    """Import the plugins of the run that started this process, without which a config would not know their names."""
    try:
        load_plugins_of_parent()
    except Exception:
        _log.error("QaRL could not import the plugins of this run", exc_info=True)


def register_cpu() -> None:
    """Register the CPU platform, if it is chosen. A second call has no effect."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        import_quietly("qarl.verl.cpu_platform")


def _follow(module: Any) -> None:
    import_quietly(FOLLOWERS[module.__name__])


def end_if_a_group_is_unread() -> None:
    """End verl's command with one message and exit code 2 if it names a group of QaRL's that Hydra cannot find."""
    try:
        refuse_unread_groups(sys.orig_argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None  # verl swallows an Exception


end_if_a_group_is_unread()
register_cpu()
register_plugins()
for name in FOLLOWERS:
    wrapt.register_post_import_hook(
        _follow, name
    )  # at once, if verl has imported the module already
