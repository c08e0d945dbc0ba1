"""Make a model and its data in the working folder, and train it on a CPU.

usage: qarl demo [NAME] [KEY=VALUE ...]

NAME:
  quickstart      (default) a 0.9M-parameter Qwen3 learns to add columns of digits; vLLM samples from int4 weights
  smollm2         SmolLM2-135M-Instruct is trained on sums of digits, with rollouts from int8 weights; `make smollm2`
                  installs its weights, or the command that is shown without them
  moe             the quickstart with a mixture of experts
  verl            the quickstart in verl's trainer
  async           the same with an engine of its own, which samples while the trainer updates
  addition_chain  sums of four numbers, with answers of about 140 tokens
  letter_sorting  14 letters, sorted by insertion
  calculator      sums of products, in four turns with a calculator
  mismatch        addition_chain twice, with GRPO on the rollout's log-probs: once with quant.align=off, once aligned;
                  then one page with the curves of both, runs/mismatch.html
  examples        writes QaRL's example programs to examples/, and trains nothing

It writes models/, data/ and runs/. Making a tiny model takes one to three minutes; if it is there, nothing is
made. Then `qarl train` runs the shipped config of the demo. Each KEY=VALUE overrides the config, for example
trainer.total_training_steps=10. `python -m qarl.demo` is the same command.

exit codes:
  0    the run ended
  2    the model cannot be made, or the run cannot start; one message says why
  130  ended by Ctrl-C or SIGTERM
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from qarl.checks.exact_threads import run_threads
from qarl.config import Config, load_config
from qarl.config.demos import DEFAULT, DEMOS, PackagedModel, TinyModel
from qarl.config.errors import nearest
from qarl.config.read_config import shipped_folder
from qarl.console import entry
from qarl.errors import UserError
from qarl.process import limit_threads

EXAMPLES = "examples"


def _main(argv: list[str]) -> int:
    if argv == [EXAMPLES]:
        return write_examples()
    names = [word for word in argv if "=" not in word] or [DEFAULT]
    overrides = [word for word in argv if "=" in word]
    _check_names(names, overrides)
    demo = DEMOS[names[0]]
    apart: set[str] = set()
    if len(demo.arms) > 1:
        apart = set.symmetric_difference(*map(set, demo.arms))
    keys_apart = {word.partition("=")[0] for word in apart}
    keys_set = {word.partition("=")[0] for word in overrides}
    if taken := keys_apart & keys_set:
        fix = f"leave out {', '.join(sorted(taken))}, or run both with qarl train"
        raise UserError(
            "the two runs of this demo would be the same", where="command line", fix=fix
        )
    arms = [[f"config={demo.config}", *overridden(arm, overrides)] for arm in demo.arms]
    configs = [
        load_config(arguments) for arguments in arms
    ]  # a wrong argument is refused before the model is made
    if not configs[0].dry_run:
        limit_threads(run_threads(configs[0]))
        make_inputs(demo.source, configs[0], command=f"qarl demo {names[0]}")
    from qarl import train  # its clock starts with the import, and the model is not part of the run

    for arguments in arms:
        if code := train.main(arguments):
            return code
    if len(arms) > 1 and not configs[0].dry_run:
        from qarl.report.page import write_comparison

        page = configs[0].run_dir.parent / f"{names[0]}.html"
        print(
            f"\nboth runs on one page: {write_comparison([config.run_dir for config in configs], page)}"
        )
    return 0


def make_inputs(source: TinyModel | PackagedModel, config: Config, *, command: str) -> None:
    """Make the model and the data that `config` names, unless they are there. Raise UserError if that fails.

    command: the command that needs them, for an error."""
    if isinstance(source, PackagedModel):
        from qarl.demo import packaged_model

        packaged_model.make_missing(source, config, command)
        return
    from qarl.demo import tiny_model

    tiny_model.make_missing(tiny_model.Recipe.of(tiny_model.TASKS[source.task], source.experts))


def _check_names(names: Sequence[str], overrides: Sequence[str]) -> None:
    """Raise UserError unless `names` is one demo, and `overrides` name no config."""
    listing = f"the demos are {', '.join(DEMOS)}"
    for name in names:
        if name == EXAMPLES:
            fix = f"write qarl demo {EXAMPLES}"
            raise UserError(f"{EXAMPLES} has no keys", where="command line", fix=fix)
        if name not in DEMOS:
            guess = nearest(name, DEMOS)
            fix = f"did you mean {guess}? {listing}" if guess else listing
            raise UserError(f"there is no demo {name!r}", where="command line", fix=fix)
    if len(names) > 1:
        what = f"only one demo can run at a time, not {' and '.join(names)}"
        raise UserError(what, where="command line", fix=f"write qarl demo {names[0]}")
    if configs := [word for word in overrides if word.startswith("config=")]:
        raise UserError(
            "a demo has its own config", where=configs[0], fix=f"write qarl train {configs[0]}"
        )


def write_examples() -> int:
    """Copy the shipped programs to examples/ in the working folder, where the docs expect them. Return the exit code.

    A file that exists stays as it is."""
    source = shipped_folder(EXAMPLES)
    target = Path(EXAMPLES)
    assert source is not None
    target.mkdir(exist_ok=True)
    for path in sorted(source.glob("*.py")):
        there = (target / path.name).exists()
        if not there:
            shutil.copyfile(path, target / path.name)
        print(f"{target / path.name}: {'there already' if there else 'written'}")
    return 0


def overridden(arm: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the arguments of an arm, without those that `overrides` sets too, and then `overrides`."""
    keys = {word.partition("=")[0] for word in overrides}
    others = [word for word in arm if word.partition("=")[0] not in keys]
    return [*others, *overrides]


main, describe = entry(_main, __doc__)


if __name__ == "__main__":
    sys.exit(main())
