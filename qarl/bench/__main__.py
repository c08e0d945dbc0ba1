"""Measure products, training steps and publishes, or predict them.

usage: qarl bench PART [KEY=VALUE ...]
       qarl bench --help [PART ...]

parts:
  kernels   seconds of single products and quantizers, for every kernel that works here and for BF16
  steps     seconds of each phase of a training step, by scheme and alignment level
  trainer   only the trainer: old log-probs and update, without an engine
  publish   quantize and publish, part by part
  against   this checkout's seconds over those of another git revision, phase by phase
  plan      predicted seconds of a step on different hardware, by a roofline; nothing is run

`qarl bench --help PART` describes the keys of a part. `python -m qarl.bench` is the same command.

exit codes:
  0    everything was measured
  1    something failed or gave wrong numbers and has no figures; everything else was measured
  2    an argument is invalid
  130  ended by Ctrl-C or SIGTERM; finished measurements are kept
"""

from __future__ import annotations

import importlib
import inspect
import sys

from qarl.bench.arguments import one_of
from qarl.console import entry
from qarl.process import limit_threads

PARTS = {
    "kernels": "qarl.bench.kernels",
    **dict.fromkeys(("steps", "trainer", "publish"), "qarl.bench.steps"),
    "against": "qarl.bench.against_revision",
    "plan": "qarl.bench.plan.predict",
}
"""Part -> its module: the dataclass `KEYS`, whose `parse` reads the arguments, and `run`. It must not import torch when
it is imported, because threads are set later."""


def _main(argv: list[str]) -> int:
    part = one_of(argv[0] if argv else "", PARTS, "benchmark")
    module = importlib.import_module(PARTS[part])
    arguments = module.KEYS.parse(part, argv[1:])
    if hasattr(arguments, "threads"):
        limit_threads(arguments.threads if arguments.device == "cpu" else None)
    return int(module.run(arguments))


def _help(topics: list[str]) -> str:
    """Return the help: this page, or the keys of the parts in `topics`."""
    modules = [importlib.import_module(PARTS[one_of(part, PARTS, "benchmark")]) for part in topics]
    texts = [
        text
        for module in modules
        for text in (module.__doc__ or "", f"Keys:\n{module.KEYS.__doc__}")
    ]
    return "\n\n".join(inspect.cleandoc(text) for text in texts or [__doc__ or ""])


main, describe = entry(_main, __doc__, _help)


if __name__ == "__main__":
    sys.exit(main())
