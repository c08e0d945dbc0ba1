"""Show how far trainer and rollout differ for a run, and why.

usage: qarl diagnose config=NAME.yaml [KEY=VALUE ...]
       qarl diagnose calibrate config=NAME.yaml [batches=6] [KEY=VALUE ...]
       qarl diagnose --help [SECTION | SECTION.KEY ...]

The arguments are those of qarl train. The command samples one batch, as in the first step of that
run, but does not train the model. It prints one response token by token, and the mismatch split by
cause. `python -m qarl.diagnose` is the same command.

calibrate samples several batches, and compares the gradients of quant.align=off with the gradient
of exact, which has no mismatch. It says which cap, weight, rejection and band reproduces that
gradient best, and the share of samples that each costs. model.path may be a checkpoint of a run.

exit codes:
  0    the mismatch was measured
  2    the config, the data or the machine cannot be used; one message says why
  130  ended by Ctrl-C
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qarl.console import run_command
from qarl.errors import UserError

_CALIBRATE = "calibrate"
_BATCHES = "batches="


def main(argv: Sequence[str] | None = None) -> int:
    """Diagnose the config that `argv` describes. Return the exit code."""
    return run_command(_main, argv, describe=describe)


def _main(argv: list[str]) -> int:
    from qarl.config import load_config
    from qarl.process import limit_threads

    calibrates = argv[:1] == [_CALIBRATE]
    if calibrates:
        batches = _batches([word for word in argv[1:] if word.startswith(_BATCHES)])
        argv = [word for word in argv[1:] if not word.startswith(_BATCHES)]
    config = load_config(argv)
    limit_threads(config.trainer.num_threads)
    if calibrates:
        from qarl.diagnose.calibrate import calibrate

        calibrate(config, batches=batches)
        return 0
    from qarl.diagnose.diagnosis import diagnose

    diagnose(config)
    return 0


def _batches(words: list[str]) -> int:
    """Return the number of batches from `batches=N`, or 6. Raise UserError if it is not a number from 4 to 1000."""
    value = words[-1].removeprefix(_BATCHES) if words else "6"
    if not value.isdecimal() or not 4 <= int(value) <= 1000:
        fix = "give a number from 4 to 1000, for instance batches=6"
        raise UserError(f"batches is {value!r}", where="qarl diagnose calibrate", fix=fix)
    return int(value)


def describe(topics: list[str]) -> str:
    """Return the help: this page and a list of the config's sections, or help on the sections and keys in `topics`."""
    from qarl.config.help import config_help

    return config_help(__doc__ or "", [topic for topic in topics if topic != _CALIBRATE])


if __name__ == "__main__":
    sys.exit(main())
