"""The report of a run: its contents against the files of the run folder, its HTML against html.parser."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkout import ROOT

from qarl.report.__main__ import main
from qarl.report.page import (
    MOST_POINTS,
    SAMPLE_CHARACTERS,
    contents,
    fitting_samples,
    series_of,
    write_report,
)
from qarl.report.samples import (
    ENDS,
    append_samples,
    choose_rows,
    is_logged,
    make_sample,
    read_samples,
)

STEPS = 500
HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)> <!-- & \u2028 @@DATA@@ 漢"
PHASES = ("rollout", "reward", "old_log_prob", "update", "quantize", "publish")
OTHER_METRICS = 60
VOID = {"meta", "link", "img", "br", "input", "hr"}


def metrics_of(step: int) -> dict[str, Any]:
    """Return numbers that look like those of a run: a learning curve, a heavy tail, NaN now and then."""
    wave = math.sin(step * 12.9898) * 43758.5453 % 1.0
    metrics: dict[str, Any] = {
        "critic/score/mean": 0.3 + 0.5 * (1 - math.exp(-step / 120)) + 0.05 * wave,
        "mismatch/k3": 1e-4 * (1 + wave) * (100 if step % 97 == 0 else 1),
        "mismatch/abs_max": 0.3 * (1 + wave),
        "actor/grad_norm": "nan" if step % 100 == 50 else 0.5 + wave,
        **{
            f"timing_s/{phase}": 0.3 * (1 + wave) * (place + 1)
            for place, phase in enumerate(PHASES)
        },
        **{f"part{place % 5}/metric_{place}": place + wave for place in range(OTHER_METRICS)},
    }
    if step % 40 == 0:
        metrics["val/accuracy"] = 0.3 + 0.001 * step
    return metrics


def make_run(folder: Path, steps: int, *, tokens: int = 600) -> Path:
    """Write a run folder of `steps` steps. Each logged step has three responses of `tokens` tokens of hostile text."""
    folder.mkdir(parents=True)
    entries = [{"step": 0, "val/accuracy": 0.3}] + [
        {"step": step} | metrics_of(step) for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    for step in range(1, steps + 1):
        if is_logged(step, steps):
            append_samples(folder, [made_up_sample(step, row, tokens) for row in range(3)])
    (folder / "config.yaml").write_text(
        f"name: made-up\nnote: {HOSTILE!r}\ntrainer:\n  total_training_steps: {steps}\n"
    )
    (folder / "versions.json").write_text(
        json.dumps({"git_commit": "0" * 40, "packages": {"qarl": HOSTILE}})
    )
    warning = {
        "sign": "entropy",
        "since_step": steps // 2,
        "text": HOSTILE,
        "remedy": "lower optim.lr",
    }
    (folder / "warnings.jsonl").write_text(json.dumps(warning) + "\nnot json\n")
    summary = {"finished": True, "failed": None, "steps": steps, "note": HOSTILE}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def made_up_sample(step: int, row: int, tokens: int) -> dict[str, Any]:
    """Return one line of samples.jsonl, with a token of every strength and sign of δ."""
    strengths = (0.0, 2e-5, -3e-4, 4e-3, -5e-2, 0.7)
    pieces = (HOSTILE, "1", "+", " ", "\n", "<b>")
    return make_sample(
        step,
        f"prompt {row} {HOSTILE}",
        [place % len(pieces) for place in range(tokens)],
        [strengths[place % len(strengths)] for place in range(tokens)],
        lambda ids: pieces[ids[0]],
        advantage=1.0 - row,
        reward=float(row == 0),
        finish_reason="stop",
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "made-up", STEPS)


@pytest.fixture(scope="module")
def report(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Collects tags, attributes and texts. Every opened tag must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


def embedded(text: str) -> dict[str, Any]:
    """The JSON in the report as a browser would read it."""
    scripts = Reader(text).texts["script"]
    return json.loads(scripts[0])


def test_it_is_one_file_under_5_mb_that_names_no_address(run: Path, report: str) -> None:
    assert (run / "report.html").stat().st_size < 5e6
    reader = Reader(report)
    kinds = [tag for tag, _ in reader.tags]
    assert (
        kinds.count("script") == 2
        and kinds.count("style") == 1
        and "img" not in kinds
        and "link" not in kinds
    )
    values = [value or "" for _, attributes in reader.tags for value in attributes.values()]
    assert not [value for value in values if re.search(r"//|url\(", value)]
    assert not [
        name
        for _, attributes in reader.tags
        for name in attributes
        if name == "src" or name[:2] == "on"
    ]
    for kind in ("html", "css", "js"):
        source = (ROOT / "qarl" / "report" / f"page.{kind}").read_text(encoding="utf-8")
        assert not re.search(
            r"https?:|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|eval\(", source
        ), kind
    policy = (
        next(attributes["content"] for _, attributes in reader.tags if "http-equiv" in attributes)
        or ""
    )
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_hostile_text_stays_text(run: Path, report: str) -> None:
    assert report.count("</script") == 2 and "<img" not in report and "<!--" not in report
    data = embedded(report)
    assert data["warnings"][0]["text"] == data["summary"]["note"] == HOSTILE
    assert data["samples"][0]["tokens"][0] == HOSTILE and data["samples"][0]["prompt"].endswith(
        HOSTILE
    )
    assert "</script><script>" in data["config"]
    named = make_run(run.parent / "<b>@@DATA@@&", 3)
    text = write_report(named).read_text(encoding="utf-8")
    reader = Reader(text)
    assert reader.texts["h1"] == ["<b>@@DATA@@&"] and embedded(text)["name"] == "<b>@@DATA@@&"


def test_every_metric_is_there_with_its_steps_and_values(run: Path, report: str) -> None:
    series = embedded(report)["series"]
    assert set(series) == {*metrics_of(40)}
    assert series["val/accuracy"]["s"] == [0, *range(40, STEPS + 1, 40)]
    reward = series["critic/score/mean"]
    assert reward["s"] == list(range(1, STEPS + 1))
    for step in (1, 250, STEPS):
        assert reward["v"][step - 1] == pytest.approx(
            metrics_of(step)["critic/score/mean"], rel=1e-3
        )
    assert series["actor/grad_norm"]["v"][49] == "nan"
    assert embedded(report)["total"] == STEPS and embedded(report)["phases"][:2] == [
        "rollout",
        "reward",
    ]


def test_two_runs_on_one_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, page = make_run(tmp_path / "other", 3), tmp_path / "both.html"
    assert main([str(run), str(other), f"together={page}"]) == 0
    assert capsys.readouterr().out == f"{page}\n" and not (other / "report.html").exists()
    both = embedded(page.read_text(encoding="utf-8"))
    for folder in (run, other):
        name = f" {folder.name}"
        series = {
            key.removesuffix(name): line
            for key, line in both["series"].items()
            if key.endswith(name)
        }
        assert series == contents(folder)["series"]
    title = "Mismatch: |δ| of the sampled tokens: largest"
    largest = next(chart for chart in both["charts"] if chart["title"] == title)
    assert largest["lines"] == [[f"mismatch/abs_max {name}", name] for name in ("made-up", "other")]
    assert [warning["sign"] for warning in both["warnings"]] == [
        "entropy, made-up",
        "entropy, other",
    ]
    again = shutil.copytree(other, tmp_path / "elsewhere" / "other")
    assert main([str(other), str(again), f"together={page}"]) == 0
    assert f"critic/score/mean {again}" in embedded(page.read_text(encoding="utf-8"))["series"], (
        "names that clash"
    )
    data = tmp_path / "data.json"
    data.write_text("{}")
    for wrong in ([f"together={page}"], [str(run), "together="], [str(run), f"together={data}"]):
        assert main(wrong) == 2
    assert data.read_text() == "{}"


def test_a_comparison_replaces_nothing_but_a_comparison(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a run's own report, whether it is there or will be written, nor any other page or folder."""
    own = write_report(run)
    bare = make_run(tmp_path / "bare", 3)
    page = tmp_path / "notes.html"
    page.write_text("<h1>Notes</h1>")
    (tmp_path / "folder.html").mkdir()
    kept = own.read_text(encoding="utf-8")
    for taken, why in (
        (own, "own report has this name"),
        (bare / "report.html", "own report has this name"),
        (page, "it is no page that compares runs"),
        (tmp_path / "folder.html", "it is a folder"),
    ):
        assert main([str(run), str(bare), f"together={taken}"]) == 2
        error = capsys.readouterr().err
        assert f"together={taken} would not be" in error and why in error and "fix: " in error
    assert own.read_text(encoding="utf-8") == kept and page.read_text() == "<h1>Notes</h1>"
    assert not (bare / "report.html").exists()
    beside = run / "both.html"
    for _ in range(2):
        assert main([str(run), str(bare), f"together={beside}"]) == 0
    of_earlier_versions = beside.read_text(encoding="utf-8").replace('"runs":', '"was":', 1)
    assert of_earlier_versions != beside.read_text(encoding="utf-8")
    beside.write_text(of_earlier_versions, encoding="utf-8")
    assert main([str(run), str(bare), f"together={beside}"]) == 0


def test_a_long_series_keeps_its_spikes() -> None:
    entries = [{"step": step, "x": math.sin(step)} for step in range(50_000)]
    entries[31_415]["x"] = 40.0
    entries[27_182]["x"] = -30.0
    lost = (10_000, 20_037, 30_051, 40_064, 45_099)
    for step in lost:
        entries[step]["x"] = math.nan
    series = series_of(entries, "x")
    assert (
        series is not None
        and len(series["s"]) <= MOST_POINTS
        and series["s"] == sorted(set(series["s"]))
    )
    at = dict(zip(series["s"], series["v"], strict=True))
    assert (at[31_415], at[27_182]) == (40, -30) and [at.get(step) for step in lost] == [
        "nan"
    ] * len(lost)
    assert series_of([{"step": 1, "x": "text"}, {"step": 2, "x": None}], "x") is None


def test_samples_that_do_not_fit_lose_steps_evenly_but_not_the_last() -> None:
    samples = [
        {"step": step, "tokens": ["x" * 100_000], "delta": [0]} for step in range(10, 810, 10)
    ]
    steps = [sample["step"] for sample in fitting_samples(samples)]
    assert steps[-1] == 800 and 5 <= len(steps) <= SAMPLE_CHARACTERS // 100_000
    assert len({b - a for a, b in itertools.pairwise(steps)}) == 1
    assert fitting_samples([{"step": 1, "tokens": ["x" * 3 * SAMPLE_CHARACTERS]}]) == []


def test_missing_files_leave_their_part_empty(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "mismatch/k3": "inf"}\n{"step": 2, "mism')
    data = contents(tmp_path)
    assert (data["step"], data["total"], data["summary"], data["samples"]) == (1, None, None, [])
    (tmp_path / "summary.json").write_text('{"seconds": NaN, "finished": true}')
    assert embedded(write_report(tmp_path).read_text())["summary"] == {
        "seconds": "NaN",
        "finished": True,
    }


def test_the_chosen_rows() -> None:
    deltas = [[0.1, 0.0], [0.0], [], [-0.7, 0.2], [0.3]]
    assert choose_rows(deltas, [0.0, -1.0, 5.0, 1.0, 2.0]) == [3, 1]
    assert choose_rows(deltas, [1.0, -1.0, 5.0, 0.0, 2.0]) == [3, 0, 1]
    assert choose_rows([[0.9], [math.nan]], [0.0, 0.0]) == [1]
    assert choose_rows([[], []], [1.0, -1.0]) == []


def test_a_long_sample_keeps_both_ends(tmp_path: Path) -> None:
    length = 2 * ENDS + 5
    delta = [float(place) for place in range(length)]
    sample = make_sample(1, "p", list(range(length)), delta, lambda ids: str(ids[0]), advantage=1.0)
    assert sample["left_out"] == 5 and sample["length"] == length
    assert sample["tokens"] == [str(i) for i in (*range(ENDS), *range(ENDS + 5, length))]
    assert sample["delta"][ENDS] == pytest.approx(ENDS + 5, rel=5e-3)
    assert make_sample(1, "p", [1, 2], [0, 0], str, advantage=0.0)["left_out"] == 0


def test_a_resumed_run_replaces_the_samples_of_repeated_steps(tmp_path: Path) -> None:
    def sample(step: int, prompt: str) -> dict[str, Any]:
        return make_sample(step, prompt, [1], [math.nan], str, advantage=0.0)

    append_samples(tmp_path, [sample(10, "a"), sample(20, "a"), sample(30, "lost")])
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 40, "tok')
    append_samples(tmp_path, [sample(20, "b")])
    append_samples(tmp_path, [sample(20, "c")])
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 6 and "" not in lines
    samples = [(sample["step"], sample["prompt"]) for sample in read_samples(tmp_path)]
    assert samples == [(10, "a"), (20, "b"), (20, "c")]
    assert read_samples(tmp_path)[0]["delta"] == ["nan"]


def test_samples_of_a_batch(tmp_path: Path) -> None:
    """δ and tokens belong together, padding is left out, and the settings decide whether anything is written."""
    from qarl.rollout.requests import RolloutBatch
    from qarl.trainer.batch import make_batch
    from qarl.trainer.mismatch_watch import log_step_samples
    from qarl.trainer.old_log_probs import Measured

    rollout = RolloutBatch(
        [[7, 8], [9]],
        [[1, 2, 3], [4]],
        [[-1.0, -2.0, -3.0], [-0.5]],
        ["length", "stop"],
        weight_version=0,
    )
    batch = make_batch(rollout, torch.tensor([0.0, 1.0]), torch.tensor([-1.0, 1.0]), pad_token_id=0)
    old = torch.tensor([[-1.0, -2.25, -3.0], [-0.25, 99.0, 99.0]])
    tokenizer = SimpleNamespace(decode=lambda ids: ",".join(map(str, ids)))

    def log(
        step: int, report: bool, known: tuple[bool, bool] = (True, True)
    ) -> list[dict[str, Any]]:
        trainer = SimpleNamespace(report=report, total_training_steps=33)
        measured = Measured(old, torch.tensor(known))
        log_step_samples(
            SimpleNamespace(trainer=trainer, run_dir=tmp_path), step, batch, measured, tokenizer
        )  # type: ignore[arg-type]  # a stand-in
        return read_samples(tmp_path)

    assert log(10, False) == log(12, True) == log(10, True, known=(False, False)) == []
    first, second = log(33, True)
    assert (first["prompt"], first["tokens"], first["delta"]) == (
        "7,8",
        ["1", "2", "3"],
        [0.0, -0.25, 0.0],
    )
    assert (first["reward"], first["advantage"], first["finish_reason"], first["step"]) == (
        0.0,
        -1.0,
        "length",
        33,
    )
    assert [second[key] for key in ("prompt", "tokens", "delta", "finish_reason")] == [
        "9",
        ["4"],
        [0.25],
        "stop",
    ]
    (only,) = [sample for sample in log(20, True, known=(False, True)) if sample["step"] == 20]
    assert only["tokens"] == ["4"]  # nobody knows δ of the other response
