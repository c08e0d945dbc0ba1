"""Measure products, training steps, rollouts and publishes, or predict them.

usage: qarl bench PART [KEY=VALUE ...]
       qarl bench --help [PART ...]

parts: kernels, steps, rollout, trainer, publish, ceilings, plan, agree. `qarl bench --help PART`
describes the keys of one. `python -m qarl.bench` is the same command.

exit codes:
  0    everything was measured
  1    a check failed, so figures are missing; the rest was measured
  2    an argument is invalid
  130  ended by Ctrl-C
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType

from qarl.console import run_command
from qarl.errors import UserError

PARTS = {
    "kernels": "qarl.bench.arguments:run_kernels",
    "steps": "qarl.bench.steps.arguments:run_part",
    "rollout": "qarl.bench.steps.arguments:run_part",
    "trainer": "qarl.bench.steps.arguments:run_part",
    "publish": "qarl.bench.steps.arguments:run_part",
    "ceilings": "qarl.bench.cost.arguments:run_ceilings",
    "plan": "qarl.bench.cost.arguments:run_plan",
    "agree": "qarl.bench.steps.agree:run_agree",
}
"""Name of a part -> `module:function`, which takes the name and the arguments and returns the exit code. The module
does not import torch: the threads are set before that."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the part that `argv` names; returns the exit code."""
    return run_command(_main, argv, describe=describe)


def _main(argv: list[str]) -> int:
    module, _, function = PARTS[_part(argv[0] if argv else "")].partition(":")
    return int(getattr(importlib.import_module(module), function)(argv[0], argv[1:]))


def describe(topics: list[str]) -> str:
    """The help: this page, or what the modules of the parts in `topics` say about their keys."""
    texts = [__doc__ or ""]
    if topics:
        modules = [importlib.import_module(PARTS[_part(part)].partition(":")[0]) for part in topics]
        texts = [text for module in modules for text in (module.__doc__, _keys(module)) if text]
    return "\n\n".join(inspect.cleandoc(text) for text in texts)


def _keys(module: ModuleType) -> str:
    return "\n\n".join(kind.__doc__ or "" for name, kind in vars(module).items() if name.endswith("Arguments"))


def _part(name: str) -> str:
    """`name`; UserError if there is no such part."""
    if name not in PARTS:
        near = difflib.get_close_matches(name, PARTS, n=1)
        raise UserError(
            f"there is no benchmark {name!r}" if name else "no benchmark is named",
            where="qarl bench",
            fix=f"one of {', '.join(PARTS)}" + (f" (nearest: {near[0]})" if near else ""),
        )
    return name


if __name__ == "__main__":
    sys.exit(main())
