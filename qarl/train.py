"""Train a model as a config describes.

usage: qarl train config=NAME.yaml [KEY=VALUE ...]
       qarl train --help [SECTION | SECTION.KEY ...]

NAME is a path, or the name of a file in ./configs or of a shipped config. Each KEY=VALUE overrides
the file; values are YAML. dry_run=true checks the config, prints it and stops.
docs/lookup/config_reference.md describes every key. `python -m qarl.train` is the same command.

exit codes:
  0    the run ended
  2    the config, the data or the machine cannot be used; one message says why
  129  ended by SIGHUP: the terminal was closed
  130  ended by Ctrl-C or SIGTERM
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qarl.console import entry, note, say, stage, summary_text
from qarl.errors import UserError
from qarl.hangup import interrupted_code
from qarl.progress import live

if TYPE_CHECKING:
    from qarl.config import Config

_STARTED = time.perf_counter()


def _main(argv: list[str]) -> int:
    from qarl.checks.bands import narrow_bands
    from qarl.checks.exact_threads import run_threads
    from qarl.config import load_config
    from qarl.config.hints import unread_paper_keys, unusual_values
    from qarl.kernels.cuda import whole_sums
    from qarl.process import limit_threads

    config = load_config(argv)
    narrow = narrow_bands(config)
    for warning in [*unusual_values(config), *([narrow] if narrow else [])]:
        say(f"warning: {warning}")
    for text in unread_paper_keys(config):
        note(text)
    if config.dry_run:
        dry_run(config)
        return 0
    if config.backend == "local":  # verl trains in other processes, see qarl.verl.config
        limit_threads(run_threads(config))
        whole_sums.set_variables(asked=config.quant.align.zero_mismatch)
    return run(config, argv)


def _help(topics: list[str]) -> str:
    """Return the help: this page and the config's sections, or help on the sections and keys in `topics`."""
    from qarl.config.help import config_help

    return config_help(__doc__ or "", topics)


main, describe = entry(_main, __doc__, _help)


def run(config: Config, argv: Sequence[str]) -> int:
    """Train with the configured backend. Return the exit code. `argv`: the command, which also resumes the run."""
    from qarl.config import check_writable
    from qarl.trainer.repeat import arguments_that_resume
    from qarl.trainer.run_lock import lock_run

    live.switch(config.trainer.progress)
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    check_writable(config.run_dir)
    with lock_run(
        config.run_dir
    ):  # before the slow imports, so that of two starts one ends at once
        summary = _train(config)
    again = arguments_that_resume(config, argv)
    print(
        summary_text(config.name, config.run_dir, summary, report=config.trainer.report, argv=again)
    )
    return interrupted_code() if summary["interrupted"] else 0


def _train(config: Config) -> dict[str, Any]:
    """Train with the configured backend. Return the summary."""
    from qarl.checks.model_folder import check_files

    check_files(config)  # before the slow imports
    if config.backend == "verl":
        with stage("importing PyTorch and verl", imports=True):
            from qarl.verl.run import train as train_in_verl

        return train_in_verl(config, started=_STARTED)
    with stage("importing PyTorch and vLLM", imports=True):
        from qarl.trainer.loop import train_in_run_folder

    return train_in_run_folder(config, started=_STARTED)


def dry_run(config: Config) -> None:
    """Print the config, write it to a file, and print all errors. No earlier run is touched, and nothing starts but the
    processes that load the functions of `reward` and `rollout.environment`, which end at once.

    Without a model folder and without checkpoints, a dry run of the local backend imports neither torch nor
    transformers.

    Raises:
        UserError: the last of the errors: the backend cannot run this config or this model, a function cannot be
            loaded, or the run would refuse to resume.
    """
    from qarl.config import write_resolved

    path = config.run_dir / "dry_run.yaml"
    write_resolved(config, path)
    print(config.resolved_yaml(), end="")
    if config.backend == "verl":
        from qarl.verl.run import dry_run as dry_run_of_verl

        print(f"# verl's own config for this run:\n{dry_run_of_verl(config)}", end="")
    sys.stdout.flush()
    say(f"# dry run: written to {path}; nothing was trained")
    errors = list(_errors(config))
    for error in errors[:-1]:
        say(f"error: {error}")
    if errors:
        raise errors[-1]


def _errors(config: Config) -> Iterator[UserError]:
    if Path(config.model.path).is_dir():  # a model that is elsewhere is checked by the run
        from qarl.checks.registry import model_errors

        yield from model_errors(config)
    from qarl.checkpoint.storage import checkpoints_dir
    from qarl.checks.named_functions import load_errors

    yield from load_errors(config)

    checks: list[Callable[[Config], object]] = []
    if config.backend == "verl":
        from qarl.verl.checks import refuse_unsupported

        checks.append(refuse_unsupported)
    if checkpoints_dir(config.run_dir).is_dir() or config.trainer.resume_from_path is not None:
        checks.append(_check_resume)
    for check in checks:
        try:
            check(config)
        except UserError as error:
            yield error


def _check_resume(config: Config) -> None:
    from qarl.checks.check import RunInputs
    from qarl.trainer.resume import find_start
    from qarl.verl.resume import find_verl_start

    record = RunInputs(config).record if Path(config.model.path).is_dir() else None
    if config.backend == "verl":
        find_verl_start(config, record)
    else:
        find_start(config, record)


if __name__ == "__main__":
    sys.exit(main())
