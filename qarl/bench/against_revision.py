"""`python -m qarl.bench against REV`: this checkout's seconds over those of another git revision, phase by phase.

    python -m qarl.bench against main~1
    python -m qarl.bench against a40a589 config=quickstart_moe.yaml pairs=5 steps=6

A pair runs the config once with each revision, each in a process of its own and in the same environment; the revision
that goes first alternates. A revision's seconds in a pair are the median of its steps after the first. The table has
the median of the pairs' ratios, with minimum and maximum: two equal revisions show how far chance alone moves them.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from qarl.bench.report import markdown_table
from qarl.config.command_arguments import read_request
from qarl.errors import UserError

PHASES = {"rollout": "rollout", "old_log_probs": "old_log_prob"}
PHASES |= {name: name for name in ("update", "publish", "step")}
"""Name in the table -> name in `timing_s/*` of metrics.jsonl."""
CHECKOUT = Path(__file__).resolve().parents[2]
_QUIET = ("resume_mode=disable", "val_before_train=false", "test_freq=-1", "save_freq=-1", "save_final=false",
          "plots=false", "logger=[console]")  # fmt: skip


@dataclass(frozen=True, config={"extra": "forbid"})
class Arguments:
    """
    config    the config of both revisions, taken from this checkout
    pairs     how often each revision runs
    steps     training steps of each run; the first is not counted"""

    revision: str
    config: str = "quickstart.yaml"
    pairs: PositiveInt = 3
    steps: Annotated[int, Field(ge=2)] = 6

    @classmethod
    def parse(cls, part: str, words: Sequence[str]) -> Arguments:
        """Read the arguments, one of which is a revision. Raise UserError if one is invalid."""
        example = "qarl bench against main~1"
        return read_request(cls, words, example=example, positional="revision")


KEYS = Arguments
Times = dict[str, float]
"""Phase -> seconds, and "length" -> mean response length of the steps that were counted."""


def run(arguments: Arguments) -> int:
    """Compare, print, and return the exit code. Raise UserError if a revision cannot run the config."""
    print(table(compare(arguments, CHECKOUT), arguments.revision))
    return 0


def compare(arguments: Arguments, checkout: Path) -> list[dict[str, Times]]:
    """Return for each pair {"before": times of the revision, "now": times of `checkout` with uncommitted changes}."""
    with (
        tempfile.TemporaryDirectory() as folder,
        worktree(checkout, arguments.revision, Path(folder) / "before") as before,
    ):
        trees = {"before": before, "now": checkout}
        pairs = []
        for number in range(arguments.pairs):
            order = list(trees) if number % 2 == 0 else list(trees)[::-1]
            pair: dict[str, Times] = {}
            for name in order:
                print(
                    f"pair {number + 1} of {arguments.pairs}: {name}", file=sys.stderr, flush=True
                )
                pair[name] = launch(
                    trees[name], checkout, arguments, Path(folder) / f"{name}-{number}"
                )
            pairs.append(pair)
    return pairs


@contextlib.contextmanager
def worktree(checkout: Path, revision: str, folder: Path) -> Iterator[Path]:
    """Check `revision` out into `folder`, and remove it in the end. Raise UserError if git cannot."""
    git = ["git", "-C", str(checkout), "worktree"]
    completed = subprocess.run(
        [*git, "add", "--detach", str(folder), revision],
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode:
        why = completed.stderr.strip().rpartition("\n")[2]
        fix = "give a branch, a tag or a commit of this repository; `git branch --all` and `git tag` list them"
        raise UserError(f"git cannot check out {revision!r}", where=str(checkout), why=why, fix=fix)
    try:
        yield folder
    finally:
        removal = [*git, "remove", "--force", str(folder)]
        subprocess.run(removal, capture_output=True, check=False)


def launch(tree: Path, checkout: Path, arguments: Arguments, folder: Path) -> Times:
    """Train with the code of `tree`. Both revisions run in `checkout`, so they read the same models, data and configs.

    PYTHONPATH comes before an editable installation; PYTHONSAFEPATH keeps the working folder's code out."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    keys = [
        f"config={config_of(arguments.config, checkout)}",
        f"output_dir={folder}",
        "name=against",
    ]
    keys += [
        f"trainer.total_training_steps={arguments.steps}",
        *(f"trainer.{key}" for key in _QUIET),
    ]
    command = [sys.executable, "-m", "qarl.train", *keys]
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        printed = (done.stderr or done.stdout).strip()
        lines = "\n".join(printed.splitlines()[-12:])
        raise UserError("a run failed, so there is no figure", where=str(tree), why=lines)
    written = (folder / "against" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return times([json.loads(line) for line in written])


def config_of(name: str, checkout: Path) -> str:
    """Return the path of this checkout's config, so that an older revision does not read its own of that name."""
    path = Path(name) if Path(name).is_file() else checkout / "configs" / name
    if not path.is_file():
        raise UserError(
            f"there is no config {name!r}", where="config", fix="give a path, or a name in configs/"
        )
    return str(path.resolve())


def times(history: Sequence[dict[str, Any]]) -> Times:
    """Return the median seconds of each phase and the mean response length, over the steps after the first."""
    steps = [entry for entry in history if "timing_s/step" in entry][1:]
    keys = {
        name: f"timing_s/{key}" for name, key in PHASES.items() if f"timing_s/{key}" in steps[-1]
    }
    medians = {}
    for name, key in keys.items():
        medians[name] = statistics.median(entry[key] for entry in steps)
    return medians | {"length": statistics.fmean(entry["response_length/mean"] for entry in steps)}


def table(pairs: Sequence[dict[str, Times]], revision: str) -> str:
    """Return a Markdown table of seconds and ratios, and a warning if the two revisions did not do the same work."""
    heads = [
        "phase",
        f"{revision}, s",
        "now, s",
        "now / before",
        f"minimum-maximum of {len(pairs)} pairs",
    ]
    rows = []
    for phase in (
        name for name in PHASES if all(name in times for pair in pairs for times in pair.values())
    ):
        before, now = (
            statistics.median(pair[name][phase] for pair in pairs) for name in ("before", "now")
        )
        each = [pair["now"][phase] / pair["before"][phase] for pair in pairs]
        spread = f"{min(each):.3f}-{max(each):.3f}"
        rows.append(
            [phase, f"{before:.3g}", f"{now:.3g}", f"{statistics.median(each):.3f}", spread]
        )
    lines = markdown_table(heads, rows)
    if any(pair["now"]["length"] != pair["before"]["length"] for pair in pairs):
        lines += (
            "\n\nwarning: the revisions generated responses of different lengths: not the same work"
        )
    return lines
