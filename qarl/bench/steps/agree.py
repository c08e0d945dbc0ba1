"""`python -m qarl.bench agree A.json B.json`: whether two runs of a benchmark agree within the spread that they report.

Every figure of both files is compared: seconds of each phase, ratios to plain BF16, publish's share. Two agree where
their 95% prediction intervals meet (`qarl.bench.steps.spread`). `figures=ratios` leaves the seconds out, for a machine
whose speed is another from run to run. Exit code 1 where one does not agree, or is in one file only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl.bench.arguments import one_of
from qarl.bench.steps.spread import Spread, overlap
from qarl.errors import UserError

SAME = ("kind", "device", "model", "workload")
"""What two runs must have in common to be comparable."""
FIGURES = ("all", "ratios")


def run_agree(part: str, given: Sequence[str]) -> int:
    """Print what differs; the exit code."""
    options = dict(argument.partition("=")[::2] for argument in given if argument.startswith("figures="))
    figures = options.get("figures", "all")
    one_of(figures, FIGURES, "figures")
    files = [argument for argument in given if not argument.startswith("figures=")]
    if len(files) != 2:
        raise UserError("two files are compared", where="qarl.bench agree", fix="agree A.json B.json figures=ratios")
    first, second = (_read(Path(file)) for file in files)
    for key in SAME:
        if first.get(key) != second.get(key):
            raise UserError(f"the two runs have another {key}", where=" and ".join(files),
                            why=f"{first.get(key)} and {second.get(key)}")  # fmt: skip
    compared, apart = differences(first, second, seconds=figures == "all")
    for line in apart:
        print(line, file=sys.stderr)
    print(f"{compared - len(apart)} of {compared} figures agree")
    return 1 if apart or not compared else 0


def differences(first: Mapping[str, Any], second: Mapping[str, Any], *, seconds: bool) -> tuple[int, list[str]]:
    """How many figures there are, and a line for each that does not agree."""
    a, b = dict(_figures(first, seconds)), dict(_figures(second, seconds))
    apart = []
    for name in {**a, **b}:
        if name not in a or name not in b:
            apart.append(f"{name}: is in one file only")
        elif not overlap(a[name], b[name]):
            apart.append(f"{name}: {_interval(a[name])} and {_interval(b[name])}")
    return len({**a, **b}), apart


def _figures(document: Mapping[str, Any], seconds: bool) -> Iterator[tuple[str, Spread]]:
    for result in document["results"]:
        labels = ("scheme", "level", "layers", "batch", "response_length")
        name = " ".join(str(result[label]) for label in labels if result.get(label))
        for kind in (("phases",) if seconds else ()) + ("speedup", "to_off"):
            for phase, value in result.get(kind, {}).items():
                yield f"{name} {kind} {phase}", value
        if "publish_share" in result:
            yield f"{name} publish_share", result["publish_share"]


def _interval(value: Spread) -> str:
    return f"{value['median']:.4g} [{value['low']:.4g}, {value['high']:.4g}]"


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError("the file cannot be read", where=str(path), why=str(error)) from error
    if "results" not in document or "workload" not in document:
        raise UserError("not a file of qarl.bench steps, rollout, trainer or publish", where=str(path))
    return document
