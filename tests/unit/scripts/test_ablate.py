"""Ablation suites: statistics against brute force, what is run again, and the suites' keys."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT

from qarl.config import load_config

sys.path.insert(0, str(ROOT / "scripts"))
import ablate
import ablation_statistics as stats

p_of = stats.permutation_test


def by_permutations(first: Sequence[float], second: Sequence[float]) -> float:
    """p from all orders of all values, each order as likely as the others."""
    pooled, size = [*first, *second], len(first)
    measured = abs(statistics.fmean(first) - statistics.fmean(second))
    orders = list(itertools.permutations(pooled))
    hits = [
        abs(statistics.fmean(o[:size]) - statistics.fmean(o[size:])) >= measured - 1e-12
        for o in orders
    ]
    return sum(hits) / len(orders)


def test_the_permutation_test_counts_all_ways() -> None:
    assert p_of([1, 2, 3, 4], [11, 12, 13, 14]) == (pytest.approx(2 / 70), pytest.approx(2 / 70))
    assert p_of([0.5, 0.5], [0.5, 0.5])[0] == 1.0
    rng = random.Random(0)
    for sizes in ((3, 3), (2, 4), (1, 5), (4, 3)):
        first, second = ([rng.gauss(0, 1) for _ in range(size)] for size in sizes)
        assert p_of(first, second)[0] == pytest.approx(by_permutations(first, second))
    assert p_of([1.0], [2.0, 3.0, 4.0])[1] == pytest.approx(1 / 4)


def test_ways_drawn_at_random_tell_arms_apart() -> None:
    near, far = [0.1, 0.2, 0.1, 0.2], [0.9, 0.8, 0.9, 0.8]
    assert p_of(near, near[::-1], near)[0] > 0.3 and p_of(near, far, [0.5] * 4)[0] < 0.01
    p, smallest = p_of(near * 3, far * 3)
    assert p == p_of(near * 3, far * 3)[0] < 1e-3 and smallest < 1e-3


def history(rewards: Sequence[float], accuracies: Sequence[float]) -> list[dict[str, float]]:
    entries = [{"step": step, "critic/score/mean": value} for step, value in enumerate(rewards, 1)]
    for place, value in enumerate(accuracies):
        entries[place * (len(entries) - 1) // max(1, len(accuracies) - 1)]["val/accuracy"] = value
    return entries


def test_the_figures_of_a_run() -> None:
    rising = [0.3 + 0.004 * step for step in range(120)]
    figures = stats.run_figures(history(rising, [0.3, 0.6, 0.7]))
    assert (figures["accuracy_before"], figures["accuracy_after"], figures["accuracy_best"]) == (
        0.3,
        0.7,
        0.7,
    )
    assert (
        figures["reward_end"] == pytest.approx(statistics.fmean(rising[-10:]))
        and figures["collapsed"] is False
    )
    fallen = [*rising, *[0.3] * 20]
    assert stats.run_figures(history(fallen, [0.3, 0.7, 0.3]))["collapsed"] is True
    spike = [*rising, 1.9, *[0.7] * 20]
    assert stats.run_figures(history(spike, [0.3]))["collapsed"] is False, "one step is no peak"
    entropies = [
        entry | {"rollout/entropy": entry["step"] / 10} for entry in history(rising, [0.3])
    ]
    assert stats.run_figures(entropies)["entropy_end"] == pytest.approx(11.55)
    empty = stats.run_figures([])
    assert empty["collapsed"] is None and empty["accuracy_after"] is None


def entry(
    arm: str, seed: int, after: float | None, failed: str | None = None, **more: Any
) -> dict[str, Any]:
    row = {"arm": arm, "seed": seed, "failed": failed, "minutes": 2.0}
    return (
        row
        if failed
        else row | {"accuracy_after": after, "collapsed": after is not None and after < 0.1} | more
    )


def test_the_table() -> None:
    runs = [entry("off", seed, value, k3=8e-3) for seed, value in enumerate((0.5, 0.6, 0.05, 0.55))]
    runs += [entry("model", seed, value, k3=0.0) for seed, value in enumerate((0.7, 0.8, 0.75))]
    runs += [entry("model", 3, None, failed="exit code 2")]
    head, _, off, model = stats.table(runs, "off").splitlines()
    cells = [
        dict(
            zip(
                *(map(str.strip, line.strip("|").split(" | ")) for line in (head, row)), strict=True
            )
        )
        for row in (off, model)
    ]
    assert (
        cells[0]["accuracy after"] == "42.5% ± 25.3%"
        and cells[1]["accuracy after"] == "75.0% ± 5.0%"
    )
    assert [row["seeds"] for row in cells] == ["4", "4, 1 failed"]
    assert cells[0]["each seed"] == "50.0%, 60.0%, 5.0%, 55.0%" and cells[0]["k3"] == "8.0e-03"
    assert [row["collapsed"] for row in cells] == ["1 of 4", "0 of 3"]
    assert cells[0]["against off"] == "" and cells[1]["against off"] == "+32.5 points"
    p = by_permutations((0.5, 0.6, 0.05, 0.55), (0.7, 0.8, 0.75))
    assert cells[1]["p (smallest possible)"] == f"{p:.3f} ({1 / 35:.3f})"
    assert "rejected" not in cells[0], "a column without values is left out"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ablate.main` with a training that only writes files. `calls`: names of the runs; `fail`: names that fail."""
    state = SimpleNamespace(calls=[], fail=set(), output=tmp_path)

    def train(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
        state.calls.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        rewards = [0.3 + 0.01 * step for step in range(30)]
        lines = [
            json.dumps(entry | {"mismatch/k3": 1e-3}) for entry in history(rewards, [0.3, 0.6])
        ]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        failed = "exit code 2: error: made to fail" if folder.name in state.fail else None
        record = {"arguments": list(arguments), "failed": failed, "minutes": 1.5, "commit": "abc"}
        (folder / ablate.RECORD).write_text(json.dumps(record))
        return record

    monkeypatch.setattr(ablate, "train", train)

    def main(*arguments: str) -> tuple[int, list[str]]:
        state.calls.clear()
        code = ablate.main([*arguments, "--output", str(tmp_path)])
        return code, sorted(state.calls)

    state.main = main
    return state


def test_a_suite_runs_once_and_is_continued(fake: Any) -> None:
    names = ["model-s0", "model-s1", "off-s0", "off-s1"]
    fake.fail = {"model-s1"}
    assert fake.main("sorting", "--seeds", "0", "1") == (1, names)
    results = json.loads((fake.output / "sorting" / "results.json").read_text())
    order = [("off", 0), ("off", 1), ("model", 0), ("model", 1)]
    assert [(run["arm"], run["seed"]) for run in results["runs"]] == order
    assert results["minutes"] == 6 and "made to fail" in results["runs"][3]["failed"]
    assert results["command"].startswith("python scripts/ablate.py sorting --seeds 0 1")
    text = (fake.output / "sorting" / "table.md").read_text()
    assert (
        "| model | 2, 1 failed | 60.0% |" in text
        and "Two seeds prove nothing" in text
        and "6 minutes in all" in text
    )
    assert (fake.output / "sorting" / "curves.png").stat().st_size > 1000

    fake.fail = set()
    assert fake.main("sorting", "--seeds", "0", "1") == (0, ["model-s1"]), (
        "the failed one again, the others are kept"
    )
    assert fake.main("sorting", "--seeds", "0", "1", "2") == (0, ["model-s2", "off-s2"])
    assert fake.main("sorting", "--seeds", "0", "--arms", "off", "--set", "optim.lr=1e-5") == (
        0,
        ["off-s0"],
    )
    assert fake.main("sorting", "--arms", "none") == (2, [])
    assert fake.main("no_such_suite") == (2, [])


def test_runs_of_the_committed_results_are_not_repeated(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablate, "SAVED", fake.output)
    fake.fail = {"model-s1"}
    assert fake.main("sorting", "--seeds", "0", "1", "--save")[0] == 1
    fake.fail = set()
    shutil.rmtree(fake.output / "sorting")
    again = ("sorting", "--seeds", "0", "1", "--reuse-saved")
    assert fake.main(*again) == (0, ["model-s1"])
    results = json.loads((fake.output / "sorting" / "results.json").read_text())
    assert [run["failed"] for run in results["runs"]] == [None] * 4
    shutil.rmtree(fake.output / "sorting")
    assert fake.main(*again, "--set", "optim.lr=1e-5")[1] == [
        "model-s0",
        "model-s1",
        "off-s0",
        "off-s1",
    ]


def test_a_training_that_fails_is_recorded(tmp_path: Path) -> None:
    record = ablate.train(["config=no_such_config.yaml"], tmp_path / "run")
    assert record["failed"].startswith("exit code 2: error:") and (tmp_path / "run.log").is_file()
    assert ablate.finished(tmp_path / "run", ["config=no_such_config.yaml"]) is None


SUITES = sorted(path.stem for path in (ROOT / "scripts" / "suites").glob("*.yaml"))


@pytest.mark.parametrize("name", SUITES)
def test_every_run_of_a_suite_is_a_valid_config(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    suite = ablate.load_suite(name)
    runs = [ablate.Run(arm, 0) for arm in suite.arms]
    configs = [load_config(suite.arguments(run, tmp_path, [])) for run in runs]
    assert len(
        {config.model_copy(update={"name": "x"}).model_dump_json() for config in configs}
    ) == len(runs)
    assert not any(
        isinstance(value, bool) for arm in suite.arms.values() for value in arm.values()
    ), "quote off in YAML"


def test_an_arm_begins_where_an_earlier_one_ended(tmp_path: Path) -> None:
    arguments = ablate.load_suite("post_training").arguments(
        ablate.Run("bf16_then_w4a16", 3), tmp_path, []
    )
    assert f"model.path={tmp_path}/bf16-s3/export" in arguments
