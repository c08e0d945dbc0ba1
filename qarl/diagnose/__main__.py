"""Show how far trainer and rollout differ for a run, and why.

usage: qarl diagnose config=NAME.yaml [KEY=VALUE ...]
       qarl diagnose --help [SECTION | SECTION.KEY ...]

Takes the arguments of qarl train. Samples one batch as the first step of that run would, trains
nothing, and prints a response token by token and the mismatch split by cause.
`python -m qarl.diagnose` is the same command.

exit codes:
  0    the mismatch was measured
  2    the config, the data or the machine is unfit: one message says why
  130  ended by Ctrl-C
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qarl.console import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Diagnose the config that `argv` describes; returns the exit code."""
    return run_command(_main, argv, describe=describe)


def _main(argv: list[str]) -> int:
    from qarl.config import load_config
    from qarl.process import limit_threads

    config = load_config(argv)
    limit_threads(config.trainer.num_threads)
    from qarl.diagnose.diagnosis import diagnose

    diagnose(config)
    return 0


def describe(topics: list[str]) -> str:
    """The help: this page and the config's sections, or the sections and keys in `topics`."""
    from qarl.config.help import config_help

    return config_help(__doc__ or "", topics)


if __name__ == "__main__":
    sys.exit(main())
