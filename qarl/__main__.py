"""Reinforcement learning with low-bit rollouts and a trainer aligned to them.

usage: qarl COMMAND [KEY=VALUE ...]
       qarl COMMAND --help
       qarl --version

`python -m qarl` is the same as qarl, and `python -m qarl.COMMAND` is the same as qarl COMMAND (warm-start: warm_start,
data: sources).
`qarl demo examples` writes short programs to start from: a loop, a task and a reward of your own, and TRL.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from qarl.console import entry, fit_terminal
from qarl.errors import UserError

COMMANDS = {
    "demo": ("qarl.demo.__main__", "make a small model and its data, and train it on this CPU"),
    "train": ("qarl.train", "train a model as a config describes"),
    "warm-start": (
        "qarl.warm_start",
        "make a tiny model, data and a config for a task of your own",
    ),
    "data": ("qarl.sources.__main__", "write data files for training from a source of problems"),
    "doctor": ("qarl.doctor.__main__", "find what would go wrong with a run before it starts"),
    "diagnose": (
        "qarl.diagnose.__main__",
        "show how far trainer and rollout differ for a run, and why",
    ),
    "export": ("qarl.export", "write a checkpoint of a run as a model folder that vLLM loads"),
    "convert-gguf": (
        "qarl.convert_gguf.__main__",
        "make an ordinary model folder of a GGUF file",
    ),
    "eval": ("qarl.eval.__main__", "score a run or an exported model, beside BF16 if you like"),
    "report": (
        "qarl.report.__main__",
        "write report.html of a run again, from the files of its folder",
    ),
    "bench": (
        "qarl.bench.__main__",
        "measure kernels, training steps and publishes, or predict them",
    ),
}
"""Name of a command -> (its module, a summary). The module has `main` and `describe`, and imports nothing slow."""


def _main(argv: list[str]) -> int:
    if argv:
        return int(_command(argv[0]).main(argv[1:]))
    print(fit_terminal(_help([])))
    return 2


def _help(topics: list[str]) -> str:
    """Return the help: this module's docstring and the shipped configs, or the help of the command `topics[0]`."""
    if topics:
        return str(_command(topics[0]).describe(topics[1:]))
    from qarl.config.help import columns, shipped

    about = (__doc__ or "").strip()
    commands = columns({name: summary for name, (_, summary) in COMMANDS.items()})
    return "\n".join([about, "", "commands:", *commands, "", "configs:", *columns(dict(shipped()))])


def _command(name: str) -> ModuleType:
    """Return the module of a command. Raise UserError if there is no such command."""
    if name in COMMANDS:
        return importlib.import_module(COMMANDS[name][0])
    listing = ", ".join(COMMANDS)
    if "=" in name:
        raise UserError(
            "the command is missing",
            where="command line",
            fix=f"write qarl train {name} (or {listing})",
        )
    from qarl.config.errors import nearest

    guess = nearest(name, COMMANDS)
    fix = f"{f'did you mean {guess}? ' if guess else ''}the commands are {listing}; --help describes them"
    raise UserError(f"there is no command {name!r}", where="command line", fix=fix)


main, describe = entry(_main, __doc__, _help)


if __name__ == "__main__":
    sys.exit(main())
