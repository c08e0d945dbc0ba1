"""Make a tiny model and its data in the working folder, and train it on a CPU.

usage: qarl demo [NAME] [KEY=VALUE ...]

NAME:
  quickstart      (default) a 0.9M-parameter Qwen3 learns to add columns of digits; vLLM samples from int4 weights
  moe             the same with a mixture of experts
  verl            the quickstart in verl's trainer
  addition_chain  sums of four numbers, with answers of about 140 tokens
  letter_sorting  14 letters, sorted by insertion

It writes models/, data/ and runs/. Making the model takes one to three minutes; if it is there, nothing is
made. Then `qarl train` runs the shipped config of the demo. Each KEY=VALUE overrides the config, for example
trainer.total_training_steps=10. `python -m qarl.demo` is the same command.

exit codes:
  0    the run ended
  2    the model cannot be made, or the run cannot start; one message says why
  130  ended by Ctrl-C or SIGTERM
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qarl.config import load_config
from qarl.config.source import DEFAULT, DEMOS
from qarl.console import run_command
from qarl.errors import UserError
from qarl.process import limit_threads


def main(argv: Sequence[str] | None = None) -> int:
    """Make the model that `argv` names, and train it. Return the exit code."""
    return run_command(_main, argv, describe=describe)


def _main(argv: list[str]) -> int:
    names = [word for word in argv if "=" not in word] or [DEFAULT]
    if len(names) > 1 or names[0] not in DEMOS:
        fix = f"the demos are {', '.join(DEMOS)}"
        raise UserError(f"there is no demo {' '.join(names)!r}", where="command line", fix=fix)
    demo = DEMOS[names[0]]
    arguments = [f"config={demo.config}", *(word for word in argv if "=" in word)]
    config = load_config(arguments)  # a wrong argument is refused before the model is made
    if config.dry_run:
        return _train(arguments)
    limit_threads(config.trainer.num_threads)
    from qarl.demo import tiny_model

    if code := tiny_model.main(["--task", demo.task, "--experts", str(demo.experts), "--output", demo.model]):
        return code
    return _train(arguments)


def _train(arguments: list[str]) -> int:
    from qarl import train  # its clock starts with the import, and the model is not part of the run

    return train.main(arguments)


def describe(topics: list[str]) -> str:
    """Return the help: this module's docstring."""
    return (__doc__ or "").strip()


if __name__ == "__main__":
    sys.exit(main())
