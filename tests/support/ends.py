"""The ends of a run, for tests of both backends: what it evaluates, how it ends, and what must then be there."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bad_runs import row, write_rows

from qarl.hangup import HUNG_UP, INTERRUPTED

STEPS = 3
SHAPES = ("none", "one source", "several sources", "four answers", "not a number")
"""What a run evaluates. A reward cannot be NaN, so in the last shape a stand-in logs it."""
SOURCES = {"openai/gsm8k": 2, "two words": 1, "": 1}
"""Data sources of several, and their prompts: names that metrics must bear."""
FAILING = Path("fail")
REWARD = f"""
from pathlib import Path

def score(data_source, solution_str, ground_truth, extra_info=None):
    if Path({str(FAILING)!r}).exists():
        raise LookupError("no verdict")
    return 0.5 if data_source else 1.0
"""
BOOM = "boom in a rank"


@dataclass(frozen=True)
class End:
    """What must be there after one end of a run.

    `code`: the exit code; 1 for an error of the program, which shows a traceback. `said`: words of the one error.
    `failed`: words of the summary's cause. `export`: whether there is one, else `not_exported` has words of the reason.
    """

    code: int
    said: str = ""
    failed: str | None = None
    export: bool = True
    not_exported: str = ""
    finished: bool = False


def cells(ends: Iterable[str]) -> list[Any]:
    """Every end with every shape. A fast test has the first end, the finished run, with all shapes, and each other end
    with one of them; the rest is slow."""
    table = []
    for row_number, end in enumerate(ends):
        for column, shape in enumerate(SHAPES):
            fast = row_number == 0 or row_number % len(SHAPES) == column
            table.append(pytest.param(end, shape, marks=() if fast else pytest.mark.slow))
    return table


def write_run(shape: str) -> list[str]:
    """Write the files of a run into the current directory. Return the overrides of its config."""
    Path("reward.py").write_text(REWARD)
    sources = {"test": 2} if shape != "several sources" else SOURCES
    answers = {"__rollout_n__": 4} if shape == "four answers" else {}
    files = []
    for place, (source, count) in enumerate(sources.items()):
        files.append(f"val{place}.jsonl")
        rows = [row(f"t9 t{10 + place} t{i + 3}") for i in range(count)]
        write_rows(files[-1], [entry | {"data_source": source} | answers for entry in rows])
    evaluates = shape != "none"
    return [
        f"data.val_files=[{','.join(files) if evaluates else ''}]",
        f"trainer.val_before_train={str(evaluates).lower()}",
        f"trainer.test_freq={2 if evaluates else -1}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.logger=[]",
        "trainer.report=true",
        "reward.function=reward.py:score",
    ]


def expected_accuracies(shape: str) -> dict[str, float | None]:
    """The summary's last accuracies of a run whose evaluations all took place, by `REWARD`."""
    if shape == "not a number":
        return {}
    if shape == "none":
        return {"accuracy_before": None, "accuracy_after": None}
    if shape != "several sources":
        return {"accuracy_after": 0.5}
    figures = {"openai/gsm8k": 0.5, "two words": 0.5, "''": 1.0}
    expected: dict[str, float | None] = {
        f"accuracy_after/{source}": figure for source, figure in figures.items()
    }
    return expected | {"accuracy_after": 2 / 3}


def check_end(run_dir: Path, end: End, shape: str, code: int, printed: str) -> None:
    """Compare what is there after a run with what must be."""
    assert code == end.code, printed[-2000:]
    assert "Traceback" not in printed, printed
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == (end.code == 2), printed
    assert end.said in printed
    summary = json.loads((run_dir / "summary.json").read_text(), parse_constant=_refuse)
    assert summary["finished"] is end.finished
    assert summary["interrupted"] is (end.code in (INTERRUPTED, HUNG_UP))
    assert (summary["failed"] is None) if end.failed is None else end.failed in summary["failed"], (
        summary
    )
    assert (run_dir / "export" / "model.safetensors").is_file() is end.export
    assert (summary.get("checkpoint") == str(run_dir / "export")) is end.export
    if not end.export:
        assert end.not_exported in (summary.get("not_exported") or summary["failed"])
        assert not list(run_dir.glob("export*")), "half of an export is left"
    if end.finished:
        shown = {key: summary[key] for key in expected_accuracies(shape)}
        assert shown == pytest.approx(expected_accuracies(shape))
        if shape == "not a number":
            assert summary["accuracy_after"] == "nan"
        assert (run_dir / "report.html").is_file()


def _refuse(token: str) -> None:
    raise AssertionError(f"summary.json has {token}, which is no JSON")


@contextmanager
def restored_limit(size: int = 65536) -> Iterator[Callable[[], Any]]:
    """Yield a function after which the system writes no file beyond `size` bytes in this process. With 64 KiB the
    export does not fit and the summary does; with 0 nothing can be written, as to a disk that has become read-only."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
