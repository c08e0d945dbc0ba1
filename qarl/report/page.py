"""Writes `report.html`, one file with the page's frame, style, script and the contents of a run.

The contents are a block of JSON that the script reads. Sampled text cannot become markup: every `<` in the block is
escaped, and the script writes text only as text, never as HTML. The page's Content-Security-Policy allows only this
script and this style, by their hashes. It allows no requests.

Every file of the run folder except `metrics.jsonl` may be missing. The report stays under 5 MB for a run of any length:

- Numbers are rounded to four digits.
- A series of more than `MOST_POINTS` steps is divided into groups of steps. Each group keeps its lowest and its highest
  value, so no spike is lost.
- If the samples have more than `SAMPLE_CHARACTERS` characters, every second logged step is removed, until they fit.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from qarl.checkpoint.storage import (
    METRICS_FILE,
    SUMMARY_FILE,
    holds_a_run,
    read_lines,
    write_text,
)
from qarl.config import Config
from qarl.console import say
from qarl.errors import UserError, in_one_line
from qarl.metrics.bars import bars_of_report
from qarl.metrics.plots import CHARTS, phases_of
from qarl.metrics.tracker import read_metrics
from qarl.metrics.warning_log import WARNINGS_FILE, is_warning
from qarl.report.damage import damage, damage_of
from qarl.report.samples import Sample, is_logged, read_samples

REPORT_FILE = "report.html"
MOST_POINTS = 1000
SAMPLE_CHARACTERS = 2_000_000
TEXT_CHARACTERS = 200_000
"""Largest number of characters that the report quotes from the config, and from the versions."""
_COMPARED = (
    "quant_align",
    "accuracy_before",
    "accuracy_after",
    "mismatch_abs_mean",
    "mismatch_k3_mean",
    "seconds",
)

Series = dict[str, list[Any]]
Point = tuple[int, float]
"""A training step and the value of a metric."""
Runs = Mapping[str, dict[str, Any]]
"""Name of a run -> its `contents`."""


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` of a run folder completely or not at all, and return its path.

    Raise UserError if the folder has no metrics file, and StorageError if writing fails."""
    path = Path(run_dir) / REPORT_FILE
    write_text(path, page(contents(run_dir)))
    return path


def write_comparison(run_dirs: Sequence[str | Path], path: str | Path) -> Path:
    """Write one page that shows several runs in the same charts, one metric a chart, and return its `path`.

    Raise UserError if a folder has no metrics file, and StorageError if writing fails."""
    path = Path(path)
    write_text(path, page(comparison(run_dirs, path.stem)))
    return path


def check_comparison(path: Path) -> None:
    """Raise UserError if a comparison at `path` would replace anything but an earlier comparison."""
    run_dir = path.absolute().parent
    why = None
    if path.name == REPORT_FILE and holds_a_run(run_dir):
        why = f"{run_dir.name} is the folder of a run, whose own report has this name"
    elif path.is_dir():
        why = "it is a folder"
    elif path.exists() and not _is_comparison(path):
        why = "there is a file of this name, and it is no page that compares runs"
    if why is not None:
        raise UserError(
            f"together={path} would not be a page of its own",
            where="command line",
            why=why,
            fix="choose a different name, such as together=comparison.html",
        )


def _is_comparison(path: Path) -> bool:
    page = path.read_text(encoding="utf-8", errors="replace")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    try:
        content = json.loads(data[1]) if data else None
    except ValueError:
        return False
    if not isinstance(content, dict):
        return False
    # A page of an earlier version has no "runs", but alone among pages neither a total nor phases.
    return "runs" in content or (content.get("total"), content.get("phases")) == (None, [])


def comparison(run_dirs: Sequence[str | Path], name: str) -> dict[str, Any]:
    """Return what `page.js` draws for several runs, named by their folders. There are no samples and no phases."""
    names = [Path(run_dir).resolve().name for run_dir in run_dirs]
    if len(set(names)) < len(names):
        names = [str(run_dir) for run_dir in run_dirs]
    folders = dict(zip(names, run_dirs, strict=True))
    runs = {run: contents(folder) for run, folder in folders.items()}
    metrics = {run: read_metrics(folder) for run, folder in folders.items()}
    series: dict[str, Series] = {}
    warnings = []
    for run, data in runs.items():
        series |= {f"{key} {run}": values for key, values in data["series"].items()}
        for warning in data["warnings"]:
            sign = f"{warning['sign']}, {run}"
            warnings.append(warning | {"sign": sign})
    configs = [f"# {run}\n{data['config']}" for run, data in runs.items()]
    return next(iter(runs.values())) | {
        "name": name,
        "runs": list(runs),
        "step": max(data["step"] for data in runs.values()),
        "total": None,
        "summary": _summary_of_runs(runs),
        "series": dict(sorted(series.items())),
        "charts": _charts_of_runs(runs),
        "bars": bars_of_report(metrics),
        "phases": [],
        "warnings": warnings,
        "damage": [text for data in runs.values() for text in data["damage"]],
        "samples": [],
        "config": "\n".join(configs),
    }


def _summary_of_runs(runs: Runs) -> dict[str, Any]:
    """Return the figures of each run that are compared, and whether the runs failed or finished."""
    summaries = {run: data["summary"] or {} for run, data in runs.items()}
    failures = [summary.get("failed") for summary in summaries.values()]
    figures: dict[str, Any] = {"failed": next(filter(None, failures), None)}
    figures["finished"] = all(summary.get("finished") for summary in summaries.values())
    for key in _COMPARED:
        for run, summary in summaries.items():
            if key in summary:
                figures[f"{key}: {run}"] = summary[key]
    return figures


def _charts_of_runs(runs: Runs) -> list[dict[str, Any]]:
    """Return one chart for each metric, with a line for each run."""
    logged = {key for data in runs.values() for key in data["series"]}
    charts = []
    for chart in CHARTS:
        metrics = chart.lines_in(sorted(logged))
        for key, label in metrics.items():
            drawn = asdict(chart)
            if len(metrics) > 1:
                drawn["title"] = f"{chart.title}: {label}"
            drawn["lines"] = [(f"{key} {run}", run) for run in runs]
            charts.append(drawn)
    return charts


def update_report(config: Config, step: int) -> None:
    """Write the report after `step` if `is_logged` chooses this step. If that fails, whatever the error, the run
    continues, because `qarl report` can write it later."""
    if not config.trainer.report or not is_logged(step):
        return
    try:
        write_report(config.run_dir)
    except Exception as error:
        say(f"warning: the report was not written after step {step}: {in_one_line(error)}")


def page(data: dict[str, Any]) -> str:
    """Return the HTML of the report that shows `data`, the dict of `contents`."""
    style, script = (_packaged(f"page.{kind}") for kind in ("css", "js"))
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; form-action 'none'"
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(str(data["name"])),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": text.replace("<", "\\u003c"),
    }
    # The frame is split at its marks before texts are inserted, so a mark inside a text stays text.
    pieces = _packaged("page.html").split("@@")
    pieces[1::2] = [parts[mark] for mark in pieces[1::2]]
    return "".join(pieces)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _packaged(name: str) -> str:
    return files("qarl.report").joinpath(name).read_text(encoding="utf-8")


def contents(run_dir: str | Path) -> dict[str, Any]:
    """Return everything that `page.js` draws, as JSON types. Raise UserError if the folder has no metrics file, or one
    with lines of which none can be read: a page without a step would replace a good one.

    A file that cannot be read as what it should be counts as missing. A damaged line is left out, and `damage` says
    so."""
    run_dir = Path(run_dir)
    entries = read_metrics(run_dir)
    if not entries and damage_of(run_dir / METRICS_FILE):
        raise UserError(
            "no line of the metrics can be read, so no report is written",
            where=str(run_dir / METRICS_FILE),
            why="all are torn or damaged; an earlier report stays as it is",
            fix="copy the file again from where the run was made",
        )
    names = sorted({name for entry in entries for name in entry} - {"step"})
    config = _text(run_dir / "config.yaml")
    series = {name: series_of(entries, name) for name in names}
    charts = []
    for chart in CHARTS:
        lines = chart.lines_in(names)
        charts.append(asdict(chart) | {"lines": list(lines.items())})
    return {
        "name": run_dir.resolve().name,
        "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "step": entries[-1]["step"] if entries else 0,
        "total": _total_steps(config),
        "summary": _summary(run_dir / SUMMARY_FILE),
        "series": {name: points for name, points in series.items() if points},
        "charts": charts,
        "bars": bars_of_report({"": entries}),
        "phases": phases_of(entries),
        "warnings": _warnings(run_dir / WARNINGS_FILE),
        "damage": damage(run_dir),
        "samples": fitting_samples(read_samples(run_dir)),
        "config": config,
        "versions": _text(run_dir / "versions.json"),
    }


def _total_steps(config: str) -> int | None:
    try:
        total = yaml.safe_load(config)["trainer"]["total_training_steps"]
    except (yaml.YAMLError, LookupError, TypeError):
        return None
    return total if isinstance(total, int) else None


def _summary(path: Path) -> dict[str, Any] | None:
    try:
        summary = json.loads(_text(path), parse_constant=str)
    except ValueError:
        return None
    return summary if isinstance(summary, dict) else None


def _warnings(path: Path) -> list[Any]:
    """Return the warning signs of a run in order of their first steps, without those that lack what the page shows."""
    whole = [warning for warning in read_lines(path) if is_warning(warning)]
    return sorted(whole, key=lambda warning: int(warning["since_step"]))


def series_of(entries: Sequence[Mapping[str, Any]], name: str) -> Series | None:
    """Return the steps `s` and the values `v` of a metric, or None if it has no number.

    NaN and infinities are the strings "nan", "inf" and "-inf", because JSON has no such numbers."""
    logged = [entry for entry in entries if isinstance(entry.get(name), (int, float))]
    points = [(entry["step"], entry[name]) for entry in logged]
    if not points:
        return None
    if len(points) > MOST_POINTS:
        points = _extremes(points, MOST_POINTS // 2)
    steps = [step for step, _ in points]
    values = [_short(value) for _, value in points]
    return {"s": steps, "v": values}


def _extremes(points: Sequence[Point], groups: int) -> list[Point]:
    """Return the lowest and the highest point of each of `groups` groups. A value that is not finite is the highest."""

    def height(index: int) -> tuple[bool, float]:
        _, value = points[index]
        return not math.isfinite(value), value

    shown = []
    for group in range(groups):
        start = group * len(points) // groups
        end = (group + 1) * len(points) // groups
        order = sorted(range(start, end), key=height)
        shown += sorted({order[0], order[-1]})
    return [points[index] for index in shown]


def _short(value: float) -> float | str:
    if not math.isfinite(value):
        return str(float(value))
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def fitting_samples(samples: list[Sample]) -> list[Sample]:
    """Remove every second logged step, but keep the last one, until the samples fit into `SAMPLE_CHARACTERS`."""
    while sum(len(json.dumps(sample)) for sample in samples) > SAMPLE_CHARACTERS:
        steps = sorted({sample["step"] for sample in samples})
        fewer = set(steps[::-2]) if len(steps) > 1 else set()
        samples = [sample for sample in samples if sample["step"] in fewer]
    return samples


def _text(path: Path) -> str:
    """Return the first characters of a file's text, or "" if it is missing."""
    if not path.is_file():
        return ""
    return path.read_text(encoding="utf-8", errors="replace")[:TEXT_CHARACTERS]
