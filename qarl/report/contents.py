"""Reads the contents of the report from a run folder. Every file except `metrics.jsonl` may be missing.

The report stays under 5 MB for a run of any length:

- Numbers are rounded to four digits.
- A series of more than `MOST_POINTS` steps is divided into groups of steps. Each group keeps its lowest and its highest
  value, so no spike is lost.
- If the samples have more than `SAMPLE_CHARACTERS` characters, every second logged step is removed, until they fit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qarl.metrics.charts import CHARTS
from qarl.metrics.plots import phases_of
from qarl.metrics.tracker import read_metrics
from qarl.report.samples import loads, read_samples

WARNINGS_FILE = "warnings.jsonl"
MOST_POINTS = 1000
SAMPLE_CHARACTERS = 2_000_000
TEXT_CHARACTERS = 200_000
"""Largest number of characters that the report quotes from the config, and from the versions."""

Series = dict[str, list[Any]]


def contents(run_dir: str | Path) -> dict[str, Any]:
    """Return everything that `page.js` draws, as JSON types. Raise UserError if the folder has no metrics file."""
    run_dir = Path(run_dir)
    entries = read_metrics(run_dir)
    config = _text(run_dir / "config.yaml")
    samples = fitting_samples(read_samples(run_dir))
    return {
        "name": run_dir.resolve().name,
        "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "step": entries[-1]["step"] if entries else 0,
        "total": _total_steps(config),
        "summary": _summary(run_dir),
        "series": {name: series for name in _names(entries) if (series := series_of(entries, name))},
        "charts": [asdict(chart) | {"lines": list(chart.lines.items())} for chart in CHARTS],
        "phases": phases_of(entries),
        "warnings": read_warnings(run_dir / WARNINGS_FILE),
        "samples": samples,
        "config": config,
        "versions": _text(run_dir / "versions.json"),
    }


def _names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({name for entry in entries for name in entry} - {"step"})


def series_of(entries: Sequence[Mapping[str, Any]], name: str) -> Series | None:
    """Return the steps `s` and the values `v` of a metric, or None if it has no number.

    NaN and infinities are the strings "nan", "inf" and "-inf", because JSON has no such numbers."""
    points = [(entry["step"], entry[name]) for entry in entries if _is_number(entry.get(name))]
    if len(points) > MOST_POINTS:
        points = _extremes(points, MOST_POINTS // 2)
    return {"s": [step for step, _ in points], "v": [_short(value) for _, value in points]} if points else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _extremes(points: Sequence[tuple[int, float]], groups: int) -> list[tuple[int, float]]:
    """Return the lowest and the highest point of each of `groups` groups. A value that is not finite is the highest."""
    found = []
    for group in range(groups):
        part = points[group * len(points) // groups : (group + 1) * len(points) // groups]
        order = sorted(range(len(part)), key=lambda place: (not math.isfinite(part[place][1]), part[place][1]))
        found += [part[place] for place in sorted({order[0], order[-1]})]
    return found


def _short(value: float) -> float | str:
    if not math.isfinite(value):
        return str(float(value))
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def read_warnings(path: Path) -> list[dict[str, Any]]:
    """Return the run's warnings as dicts with `sign`, `since_step`, `text` and `remedy`. Other lines are skipped."""
    found: list[dict[str, Any]] = []
    for line in _text(path).splitlines():
        try:
            warning = loads(line)
            texts = {name: str(warning.get(name) or "") for name in ("sign", "text", "remedy")}
            found.append({"since_step": int(warning["since_step"]), **texts})
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return sorted(found, key=lambda warning: warning["since_step"])


def fitting_samples(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove every second logged step, but keep the last one, until the samples fit into `SAMPLE_CHARACTERS`."""
    while samples and sum(len(json.dumps(sample)) for sample in samples) > SAMPLE_CHARACTERS:
        steps = sorted({sample["step"] for sample in samples})
        kept = set(steps[::-2]) if len(steps) > 1 else set()
        samples = [sample for sample in samples if sample["step"] in kept]
    return samples


def _text(path: Path) -> str:
    """Return a file's text, or "" if it is missing or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:TEXT_CHARACTERS]
    except OSError:
        return ""


def _summary(run_dir: Path) -> dict[str, Any] | None:
    try:
        summary = loads(_text(run_dir / "summary.json"))
    except ValueError:
        return None
    return summary if isinstance(summary, dict) else None


def _total_steps(config: str) -> int | None:
    """Return `trainer.total_training_steps` of a resolved config, or None."""
    import yaml

    try:
        total = yaml.safe_load(config)["trainer"]["total_training_steps"]
    except (yaml.YAMLError, KeyError, TypeError):
        return None
    return total if isinstance(total, int) else None
