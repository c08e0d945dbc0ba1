"""`python -m qarl.bench agree A.json B.json`: whether two runs of a benchmark agree within the spread that they report.

Every figure that their tables show is compared: seconds of each phase, ratios to plain BF16 and to `off`, publish's
share. For each, Welch's t-test on the launches of the two runs says how often two runs of one thing would differ by
that much. Of a hundred figures five fall below 5% by chance, so the verdict is Holm's: a figure differs where its
p-value is below 5% after the correction for how many there are, and in 95 of 100 pairs of runs that measured the same
no figure does. What such a verdict is worth is printed with it: the difference that it would have found, how many
figures are below 5% one by one, and the largest difference. Of single launches the units are rounds, which differ by
less than two runs do: then more will be found to differ, and a line says so.

`figures=ratios` leaves the seconds out, for a machine whose speed is another from run to run. Exit code 1 where a
figure differs, or is in one file only.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qarl.bench.arguments import one_of
from qarl.bench.steps.results import check_release
from qarl.bench.steps.spread import Spread, detectable, p_value
from qarl.bench.steps.tables import PHASES, RATIOS
from qarl.errors import UserError

SAME = ("kind", "device", "model", "workload")
"""What two runs must have in common to be comparable."""
FIGURES = ("all", "ratios")
LEVEL = 0.05


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
    a, b = (dict(_figures(document, figures == "all")) for document in (first, second))
    alone = sorted(a.keys() ^ b.keys())
    compared = [Compared(name, a[name], b[name]) for name in a if name in b]
    apart = differing(compared)
    for name in alone:
        print(f"{name}: is in one file only", file=sys.stderr)
    for one in apart:
        print(f"{one.name}: {_interval(one.first)} and {_interval(one.second)}, p {one.p:.1g}", file=sys.stderr)
    launches = [len(one.first["samples"]) for one in compared] + [len(one.second["samples"]) for one in compared]
    if min(launches, default=2) == 1:
        print(
            "a single launch: what differs from run to run is not in its spread (launches=3 or more)", file=sys.stderr
        )
    if compared:
        print(_verdict(compared, apart))
    return 1 if apart or alone or not compared else 0


@dataclass(frozen=True)
class Compared:
    """One figure of two runs."""

    name: str
    first: Spread
    second: Spread

    @property
    def difference(self) -> float:
        """Of the means, relative to the first's."""
        if not self.first["mean"]:
            return 0.0 if not self.second["mean"] else math.inf
        return abs(self.second["mean"] / self.first["mean"] - 1)

    @cached_property
    def p(self) -> float:
        return p_value(self.first, self.second)

    def detectable(self, level: float) -> float:
        """The difference that would have had this p-value, relative to the first's mean."""
        mean = self.first["mean"]
        return detectable(self.first, self.second, level) / mean if mean else 0.0


def differing(compared: Sequence[Compared]) -> list[Compared]:
    """Those whose p-value is below 5% by Holm's procedure: the smallest of m against 5% / m, the next against
    5% / (m - 1), until one is not."""
    ordered = sorted(compared, key=lambda one: one.p)
    for place, one in enumerate(ordered):
        if one.p >= LEVEL / (len(ordered) - place):
            return ordered[:place]
    return ordered


def _verdict(compared: Sequence[Compared], apart: Sequence[Compared]) -> str:
    singly = sum(one.p < LEVEL for one in compared)
    largest = max(compared, key=lambda one: one.difference)
    median = statistics.median(one.difference for one in compared)
    found, found_singly = (
        statistics.median(one.detectable(level) for one in compared) for level in (LEVEL / len(compared), LEVEL)
    )
    return "\n".join(
        (
            f"{len(compared) - len(apart)} of {len(compared)} figures agree; "
            f"in half of them a difference of {found:.1%} would have been found",
            f"{singly} have p < {LEVEL:.0%} one by one, {LEVEL * len(compared):.0f} are to be expected by chance; so a "
            f"difference of {found_singly:.1%} would have been found in half",
            f"difference of the means: median {median:.1%}, largest {largest.difference:.1%} ({largest.name})",
        )
    )


def _figures(document: Mapping[str, Any], seconds: bool) -> Iterator[tuple[str, Spread]]:
    for result in document["results"]:
        labels = ("scheme", "level", "layers", "batch", "response_length")
        name = " ".join(str(result[label]) for label in labels if result.get(label))
        base = result["scheme"] == "bf16" and result["level"] in ("off", None)
        kinds = {"phases": seconds, "speedup": not base, "to_off": result["level"] != "off"}  # to itself it is always 1
        shown = {"phases": PHASES[document["kind"]], "speedup": RATIOS[document["kind"]], "to_off": ("step",)}
        for kind in (kind for kind, wanted in kinds.items() if wanted):
            for phase, value in result.get(kind, {}).items():
                if phase in shown[kind]:
                    yield f"{name} {kind} {phase}", value
        if "publish_share" in result:
            yield f"{name} publish_share", result["publish_share"]


def _interval(value: Spread) -> str:
    return f"{value['mean']:.4g} [{value['low']:.4g}, {value['high']:.4g}]"


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError("the file cannot be read", where=str(path), why=str(error)) from error
    if "results" not in document or "workload" not in document:
        raise UserError("not a file of qarl.bench steps, rollout, trainer or publish", where=str(path))
    check_release(document, str(path))
    return document
