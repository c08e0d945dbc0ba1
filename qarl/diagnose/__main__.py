"""`python -m qarl.diagnose config=NAME.yaml key=value ...`: how far trainer and rollout differ, and why.

Takes the same configs as `qarl.train`, samples one batch as its first step would, trains nothing, and prints a
response token by token and the mismatch split by cause (see `qarl.diagnose.diagnosis`). Exit codes: 0; 2 where the
config, the data or the machine will not do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qarl.config import load_config
from qarl.console import run_command
from qarl.process import limit_threads


def main(argv: Sequence[str] | None = None) -> int:
    """Diagnose the config that `argv` describes; returns the exit code."""
    return run_command(_main, argv)


def _main(argv: list[str]) -> int:
    config = load_config(argv)
    limit_threads(config.trainer.num_threads)
    from qarl.diagnose.diagnosis import diagnose

    diagnose(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
