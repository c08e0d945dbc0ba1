"""Report and plots of run folders that nobody would write: damaged, without steps, with odd names and numbers."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import config

from qarl.checkpoint.run_folder import RunFolder
from qarl.checkpoint.storage import StorageError, json_safe
from qarl.metrics.plots import plot_run
from qarl.metrics.summary import summarize
from qarl.metrics.tracker import read_metrics
from qarl.metrics.validation import sources_metrics
from qarl.report import page
from qarl.report.__main__ import main
from qarl.report.page import contents, update_report, write_report
from qarl.trainer.finish import finish_run

NAMES = (
    "openai/gsm8k",
    "",
    "two words",
    "$cost_$x^{",
    "_private",
    "漢字",
    "a\nb",
    "x" * 300,
    "</script>",
    "nan",
)
STEP = {"timing_s/step": 1.0, "critic/score/mean": 0.5, "mismatch/k3": 1e-4}
NUMBERS = {
    "NaN": math.nan, "infinite": math.inf, "zero": 0.0, "negative": -1.0, "the largest": 1.7e308,
    "the smallest": 5e-324, "an integer beyond floats": 10**400, "text": "word", "null": None,
}  # fmt: skip


def write(folder: Path, entries: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(json_safe(entry)) + "\n" for entry in entries)
    )
    return folder


def shown(folder: Path) -> dict[str, Any]:
    """Return the contents of a report, which is written, too."""
    assert write_report(folder).read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    return contents(folder)


@pytest.mark.filterwarnings("ignore:Glyph")
def test_data_sources_of_any_name_have_a_line(tmp_path):
    figures = {name: place / 10 for place, name in enumerate(NAMES)}
    run = write(tmp_path, [{"step": step} | STEP | sources_metrics(figures) for step in (1, 2)])
    assert tmp_path / "plots" / "accuracy.png" in plot_run(run)
    (chart,) = [chart for chart in shown(run)["charts"] if chart["title"] == "Held-out accuracy"]
    labels = {label for _, label in chart["lines"]}
    assert labels == {"accuracy", "''", *NAMES} - {""}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_that_no_axis_shows_are_left_out(tmp_path, case):
    odd = dict.fromkeys(
        [*STEP, "val/accuracy", "actor/grad_norm", "rollout/entropy"], NUMBERS[case]
    )
    run = write(
        tmp_path,
        [{"step": 1} | STEP | {"val/accuracy": 0.5}, {"step": 2} | odd, {"step": 3} | STEP],
    )
    assert {path.stem for path in plot_run(run)} >= {"reward", "k3", "accuracy"}
    assert shown(run)["step"] == 3


@pytest.mark.parametrize("entries", [[], [{"step": 0, "val/accuracy": 0.5}], [{"step": 0}]])
def test_a_run_without_a_step_has_a_report(tmp_path, entries):
    run = write(tmp_path, entries)
    plot_run(run)
    assert shown(run)["step"] == 0


DAMAGED = {
    "summary.json": ("", '{"finished": tr', "[1]", '{"seconds": NaN}', "\0\0"),
    "config.yaml": ("", "trainer: [", "text", "trainer:\n  total_training_steps: many", "\0"),
    "samples.jsonl": ('{"step": 1', "3", "null", '{"prompt": "1+1"}', '{"step": "one"}'),
    "warnings.jsonl": ('{"sign"', "3", '{"sign": "entropy"}', "[]"),
    "metrics.jsonl": (
        *('{"step": 4, "x', "3", "null", "[[1]]", "[" * 100_000, "\0\0\0", "\x1c\u2028", "\ufffd"),
        *('{"step": null}', '{"step": true}', '{"step": -1}', '{"step": 1e3}'),
        '{"step": 9999999999999999999999}',
        '{"step": 1, "critic/score/mean": 0.5, "timing_s/step": {"a": 1}, "x": [1], "\\ud800": null}',
    ),
}


_WHOLE = DAMAGED["metrics.jsonl"][-1]
"""Of these texts in a file of lines, the one that is no damage: it has odd values, but is an object with a step."""


@pytest.mark.parametrize("file", DAMAGED)
def test_damaged_files_of_a_run_leave_the_rest_of_its_report(tmp_path, file):
    for place, text in enumerate(DAMAGED[file]):
        run = write(tmp_path / str(place), [{"step": 1} | STEP])
        with (run / file).open("a", encoding="utf-8") as opened:
            opened.write(text)
        data = shown(run)
        plot_run(run)
        summarize(read_metrics(run))
        assert bool(data["damage"]) is (file.endswith("jsonl") and text != _WHOLE)
        assert data["step"] == 1 and data["series"]["critic/score/mean"] == {"s": [1], "v": [0.5]}
        assert data["samples"] == data["warnings"] == [] and data["total"] is None


WHOLE = {
    "metrics.jsonl": {"step": 1} | STEP,
    "samples.jsonl": {"step": 1, "prompt": "1+1", "tokens": [], "delta": [], "length": 0},
    "warnings.jsonl": {"since_step": 1, "sign": "entropy", "text": "fell", "remedy": "wait"},
}
TORN = {
    "the last line is half written": lambda line: [line, line, line[: len(line) // 2]],
    "a line in the middle is damaged": lambda line: [line, b"\0" * len(line), line],
    "a byte in the middle is damaged": lambda line: [line, line[:20] + b"\xff" + line[21:], line],
    "two lines": lambda line: [line[:-2], line, line[1:]],
}
TORN_LINES = {"the last line is half written": "3", "two lines": "1, 3"}


@pytest.mark.parametrize("case", TORN)
@pytest.mark.parametrize("file", WHOLE)
def test_a_report_says_which_lines_are_damaged(tmp_path, capsys, file, case):
    """At the command line, in the page, in a page of several runs, and at the end of a run."""
    run = write(tmp_path / "run", [{"step": 1} | STEP])
    lines = TORN[case](json.dumps(WHOLE[file]).encode())
    (run / file).write_bytes(b"\n".join(lines))
    text = f"lines of {run / file} that are torn or damaged are left out of summary, plots and report: "
    text += TORN_LINES.get(case, "2")
    for arguments in ([str(run)], [str(run), f"together={tmp_path / 'page.html'}"]):
        assert main(arguments) == 0
        assert capsys.readouterr().err == f"note: {text}\n"
    for page_of_run in (run / "report.html", tmp_path / "page.html"):
        assert text in page_of_run.read_text()
    with suppress(StorageError):  # the folder holds no export
        finish_run(
            RunFolder(run), {}, None, None, step=1, total=1, save="no", plots=False, report=False
        )
    assert f"note: {text}\n" in capsys.readouterr().err


@pytest.mark.parametrize("together", [False, True])
def test_metrics_without_one_readable_step_do_not_replace_a_page(tmp_path, capsys, together):
    run = write(tmp_path / "run", [{"step": 1} | STEP])
    pages = [f"together={tmp_path / 'page.html'}"] if together else []
    assert main([str(run), *pages]) == 0
    written = tmp_path / "page.html" if together else run / "report.html"
    before = written.read_bytes()
    (run / "metrics.jsonl").write_bytes(b"\0\0\0\ngarbage\n")
    capsys.readouterr()
    assert main([str(run), *pages]) == 2
    told = capsys.readouterr().err
    assert told.count("error: ") == 1 and "no line of the metrics can be read" in told
    assert written.read_bytes() == before


def test_no_error_of_the_report_ends_a_run(tmp_path, monkeypatch, capsys):
    settings = config(tmp_path, "trainer.report=true")

    def fail(run_dir: Path) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(page, "write_report", fail)
    update_report(settings, 1)
    assert "the report was not written after step 1: KeyError: 'a bug'" in capsys.readouterr().err


def test_files_that_an_editor_has_saved(tmp_path):
    """With a byte order mark and the line ends of Windows: the first line is that of the first evaluation."""
    entries = [{"step": 0, "val/accuracy": 0.5}, {"step": 1} | STEP]
    run = write(tmp_path / "run", entries)
    file = run / "metrics.jsonl"
    file.write_text(file.read_text(), encoding="utf-8-sig", newline="\r\n")
    assert file.read_bytes().startswith(b"\xef\xbb\xbf") and b"\r\n" in file.read_bytes()
    assert read_metrics(run) == entries and shown(run)["damage"] == []
