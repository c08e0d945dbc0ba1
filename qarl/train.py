"""`python -m qarl.train config=NAME.yaml key=value ...`: read the config, choose the backend, run.

Exit codes: 0 the run ended; 2 the config, the data or the machine is unfit (one message, no traceback), also in a dry
run; 130 Ctrl-C ended the run after the step it was in, everything written.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from qarl.config import Config, load_config, write_resolved
from qarl.config.bounds import unusual_values
from qarl.console import run_command, say
from qarl.process import limit_threads

_STARTED = time.perf_counter()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training that `argv` describes; returns the exit code."""
    return run_command(_main, argv)


def _main(argv: list[str]) -> int:
    config = load_config(argv)
    for warning in unusual_values(config):
        say(f"warning: {warning}")
    if config.dry_run:
        dry_run(config)
        return 0
    if config.backend == "local":  # verl's processes are not this one, see qarl.verl.process
        limit_threads(config.trainer.num_threads)
    return run(config)


def dry_run(config: Config) -> None:
    """Print and write the config; UserError, as the last thing said, for what the backend could not run."""
    path = config.run_dir / "dry_run.yaml"
    write_resolved(config, path)
    print(config.resolved_yaml(), end="")
    if config.backend == "verl":
        from qarl.verl.run import dry_run as dry_run_of_verl

        print(f"# verl's own config for this run:\n{dry_run_of_verl(config)}", end="")
    sys.stdout.flush()
    say(f"# dry run: written to {path}; nothing was trained")
    if config.backend == "verl":
        from qarl.verl.checks import refuse_unsupported

        refuse_unsupported(config)


def run(config: Config) -> int:
    """Train with the configured backend; returns the exit code."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if config.backend == "verl":
        from qarl.verl.run import train as train_in_verl

        summary = train_in_verl(config, started=_STARTED)
    else:
        from qarl.trainer.loop import train
        from qarl.trainer.resume import open_run

        with open_run(config) as checkpoint:
            write_resolved(config, config.run_dir / "config.yaml")
            summary = train(config, started=_STARTED, checkpoint=checkpoint)
    print_summary(config, summary)
    return 130 if summary["interrupted"] else 0


def print_summary(config: Config, summary: dict[str, object]) -> None:
    lines = [f"\n{config.name}: {summary['steps']} steps, written to {config.run_dir}"]
    for key, value in summary.items():
        if value is not None and key != "steps":
            lines.append(f"  {key:36} {f'{value:.4g}' if isinstance(value, float) else value}")
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
