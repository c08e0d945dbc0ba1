"""`dry_run=true`: print the resolved config and check it. Nothing starts, and no earlier run is touched.

Without a model folder and without checkpoints, a dry run of the local backend imports neither torch nor transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from qarl.config import Config, write_resolved
from qarl.console import say
from qarl.errors import UserError


def dry_run(config: Config) -> None:
    """Print the config and write it to a file. Print all errors.

    Raises:
        UserError: the last of the errors: the backend cannot run this config or this model, or the run would refuse to
            resume.
    """
    path = config.run_dir / "dry_run.yaml"
    write_resolved(config, path)
    print(config.resolved_yaml(), end="")
    if config.backend == "verl":
        from qarl.verl.run import dry_run as dry_run_of_verl

        print(f"# verl's own config for this run:\n{dry_run_of_verl(config)}", end="")
    sys.stdout.flush()
    say(f"# dry run: written to {path}; nothing was trained")
    errors = _errors(config)
    for error in errors[:-1]:
        say(f"error: {error}")
    if errors:
        raise errors[-1]


def _errors(config: Config) -> list[UserError]:
    errors: list[UserError] = []
    if config.backend == "verl":
        from qarl.verl.checks import refuse_unsupported

        errors += _refusal(refuse_unsupported, config)
    if Path(config.model.path).is_dir():  # a model that is elsewhere is checked by the run
        from qarl.checks.run import model_errors

        errors += model_errors(config)
    if (config.run_dir / "checkpoints").is_dir() or config.trainer.resume_from_path is not None:
        from qarl.trainer.resume import find_start
        from qarl.verl.checkpoint import find_verl_start

        errors += _refusal(find_verl_start if config.backend == "verl" else find_start, config)
    return errors


def _refusal(check: Callable[[Config], object], config: Config) -> list[UserError]:
    try:
        check(config)
    except UserError as error:
        return [error]
    return []
