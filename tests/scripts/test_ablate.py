"""Ablation suites: statistics against brute force, the search's decisions, what is run again, and the suites' keys."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT

from qarl.config import load_config
from qarl.errors import UserError

NAMES = ("ablate", "ablation_statistics", "ablation_suites", "ablation_plots", "ablation_saved")


@pytest.fixture(scope="module")
def scripts() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        modules = {name: importlib.import_module(name) for name in NAMES}
        return SimpleNamespace(
            ablate=modules["ablate"],
            stats=modules["ablation_statistics"],
            suites=modules["ablation_suites"],
            saved=modules["ablation_saved"],
        )


def by_permutations(first: Sequence[float], second: Sequence[float]) -> float:
    """p from all orders of all values, each order as likely as the others."""
    pooled, size = [*first, *second], len(first)
    measured = abs(statistics.fmean(first) - statistics.fmean(second))
    orders = list(itertools.permutations(pooled))
    hits = [abs(statistics.fmean(o[:size]) - statistics.fmean(o[size:])) >= measured - 1e-12 for o in orders]
    return sum(hits) / len(orders)


def test_the_permutation_test_counts_all_ways(scripts: Any) -> None:
    test = scripts.stats.permutation_test
    assert test([1, 2, 3, 4], [11, 12, 13, 14]) == (pytest.approx(2 / 70), pytest.approx(2 / 70))
    assert test([1, 2], [3, 4]) == (pytest.approx(2 / 6), pytest.approx(2 / 6))
    assert test([0.5, 0.5], [0.5, 0.5])[0] == 1.0
    rng = random.Random(0)
    for sizes in ((3, 3), (2, 4), (1, 5), (4, 3)):
        first, second = ([rng.gauss(0, 1) for _ in range(size)] for size in sizes)
        assert test(first, second)[0] == pytest.approx(by_permutations(first, second))
    assert test([1.0], [2.0, 3.0, 4.0])[1] == pytest.approx(1 / 4)


def test_many_seeds_are_drawn_at_random_and_give_the_same_p_each_time(scripts: Any) -> None:
    rng = random.Random(1)
    first, second = ([rng.gauss(mean, 1) for _ in range(12)] for mean in (0.0, 3.0))
    p, smallest = scripts.stats.permutation_test(first, second)
    assert p == scripts.stats.permutation_test(first, second)[0] < 1e-3 and smallest < 1e-3


def test_equal_arms_are_rarely_told_apart(scripts: Any) -> None:
    rng = random.Random(2)
    found = [[[rng.gauss(0, 1) for _ in range(4)] for _ in range(2)] for _ in range(300)]
    share = sum(scripts.stats.permutation_test(*pair)[0] <= 0.05 for pair in found) / len(found)
    assert 0.0 < share < 0.08
    assert scripts.stats.any_difference([[0.1, 0.12], [0.11, 0.13], [0.12, 0.1]]) > 0.3
    assert scripts.stats.any_difference([[0.1, 0.2, 0.1, 0.2], [0.9, 0.8, 0.9, 0.8], [0.5, 0.5, 0.4, 0.6]]) < 0.01
    assert scripts.stats.any_difference([[0.1, 0.2], []]) is None


def history(rewards: Sequence[float], accuracies: Sequence[float]) -> list[dict[str, float]]:
    entries = [{"step": step, "critic/score/mean": value} for step, value in enumerate(rewards, 1)]
    for place, value in enumerate(accuracies):
        entries[place * (len(entries) - 1) // max(1, len(accuracies) - 1)]["val/accuracy"] = value
    return entries


def test_the_figures_of_a_run(scripts: Any) -> None:
    rising = [0.3 + 0.004 * step for step in range(120)]
    figures = scripts.stats.run_figures(history(rising, [0.3, 0.6, 0.7]))
    assert (figures["accuracy_before"], figures["accuracy_after"], figures["accuracy_best"]) == (0.3, 0.7, 0.7)
    assert figures["reward_end"] == pytest.approx(statistics.fmean(rising[-10:])) and figures["collapsed"] is False
    fallen = [*rising, *[0.3] * 20]
    assert scripts.stats.run_figures(history(fallen, [0.3, 0.7, 0.3]))["collapsed"] is True
    spike = [*rising, 1.9, *[0.7] * 20]
    assert scripts.stats.run_figures(history(spike, [0.3]))["collapsed"] is False, "one step is no peak"
    entropies = [entry | {"rollout/entropy": entry["step"] / 10} for entry in history(rising, [0.3])]
    assert scripts.stats.run_figures(entropies)["entropy_end"] == pytest.approx(11.55)
    empty = scripts.stats.run_figures([])
    assert empty["collapsed"] is None and empty["accuracy_after"] is None


def entry(arm: str, seed: int, after: float | None, failed: str | None = None, **more: Any) -> dict[str, Any]:
    found = {"arm": arm, "seed": seed, "failed": failed, "minutes": 2.0}
    return found if failed else found | {"accuracy_after": after, "collapsed": after is not None and after < 0.1} | more


def test_the_table(scripts: Any) -> None:
    runs = [entry("off", seed, value, k3=8e-3) for seed, value in enumerate((0.5, 0.6, 0.05, 0.55))]
    runs += [entry("model", seed, value, k3=0.0) for seed, value in enumerate((0.7, 0.8, 0.75))]
    runs += [entry("model", 3, None, failed="exit code 2")]
    head, _, off, model = scripts.stats.table(runs, "off").splitlines()
    cells = [
        dict(zip(*(map(str.strip, line.strip("|").split(" | ")) for line in (head, row)), strict=True))
        for row in (off, model)
    ]
    assert cells[0]["accuracy after"] == "42.5% ± 25.3%" and cells[1]["accuracy after"] == "75.0% ± 5.0%"
    assert [row["seeds"] for row in cells] == ["4", "4, 1 failed"]
    assert cells[0]["each seed"] == "50.0%, 60.0%, 5.0%, 55.0%" and cells[0]["k3"] == "8.0e-03"
    assert [row["collapsed"] for row in cells] == ["1 of 4", "0 of 3"]
    assert cells[0]["against off"] == "" and cells[1]["against off"] == "+32.5 points"
    p = by_permutations((0.5, 0.6, 0.05, 0.55), (0.7, 0.8, 0.75))
    assert cells[1]["p (smallest possible)"] == f"{p:.3f} ({1 / 35:.3f})"
    assert "rejected" not in cells[0], "a column without values is left out"


def test_a_search_stops_where_it_can(scripts: Any) -> None:
    arms = {"off": {}, "model": {}}
    settings = {name: {"optim.lr": 1e-4} for name in "abc"}
    suite = scripts.suites.Suite("s", "t", "q", "c", (0, 1, 2, 3), arms, settings=settings)
    outcomes: dict[tuple[str, str, int], bool] = {}

    def step() -> tuple[list[str], str]:
        runs, verdict = scripts.suites.search_step(suite, outcomes)
        return [run.name for run in runs], verdict

    def note(collapsed: bool, *names: str) -> None:
        for setting, arm, seed in (name.split("-") for name in names):
            outcomes[setting, arm, int(seed[1:])] = collapsed

    assert step() == (["a-off-s0", "a-off-s1"], "")
    note(False, "a-off-s0", "a-off-s1")
    assert step()[0] == ["b-off-s0", "b-off-s1"], "nothing collapsed in a"
    note(True, "b-off-s0", "b-off-s1")
    assert step()[0] == ["b-model-s0", "b-model-s1"]
    note(True, "b-model-s0")
    note(False, "b-model-s1")
    assert step()[0] == ["c-off-s0", "c-off-s1"], "model collapsed in b"
    note(True, "c-off-s0")
    note(False, "c-off-s1", "c-model-s0", "c-model-s1")
    assert step()[0] == ["c-off-s2", "c-off-s3"]
    note(True, "c-off-s2", "c-off-s3")
    assert step()[0] == ["c-model-s2", "c-model-s3"]
    note(False, "c-model-s2", "c-model-s3")
    runs, verdict = step()
    assert runs == [] and verdict.startswith("found: c.") and "a: off collapsed in 0 of 2" in verdict
    note(True, "c-model-s3")
    assert step()[1].startswith("not found in 14 runs") and "c: model collapsed in 1 of 4" in step()[1]
    outcomes["c", "off", 3] = False
    assert "c: off collapsed in 2 of 4" in step()[1], "half of the seeds are not most"


def test_a_search_keeps_to_its_number_of_runs(scripts: Any) -> None:
    settings = {name: {} for name in "abcdefghijklmnop"}
    arms = {"off": {}, "model": {}}
    suite = scripts.suites.Suite("s", "t", "q", "c", (0, 1, 2, 3), arms, settings=settings, most_runs=9)
    outcomes: dict[Any, bool] = {}
    while runs := scripts.suites.search_step(suite, outcomes)[0]:
        outcomes |= {(run.setting, run.arm, run.seed): False for run in runs}
    assert len(outcomes) == 8
    assert scripts.suites.search_step(suite, outcomes)[1].startswith("not found in 8 runs")


@pytest.fixture
def fake(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ablate.main` with a training that only writes files. `calls`: names of the runs; `fail`: names that fail."""
    state = SimpleNamespace(calls=[], fail=set(), output=tmp_path)

    def train(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
        state.calls.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        rewards = [0.3 + 0.01 * step for step in range(30)]
        lines = [json.dumps(one | {"mismatch/k3": 1e-3}) for one in history(rewards, [0.3, 0.6])]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        failed = "exit code 2: error: made to fail" if folder.name in state.fail else None
        record = {"arguments": list(arguments), "failed": failed, "minutes": 1.5}
        record |= {"config": scripts.ablate.config_of(arguments)}
        (folder / scripts.ablate.RECORD).write_text(json.dumps(record))
        return record

    monkeypatch.setattr(scripts.ablate, "train", train)

    def main(*arguments: str) -> tuple[int, list[str]]:
        state.calls.clear()
        code = scripts.ablate.main([*arguments, "--output", str(tmp_path)])
        return code, sorted(state.calls)

    state.main = main
    return state


def test_a_suite_runs_once_and_is_continued(fake: Any) -> None:
    names = ["model-s0", "model-s1", "off-s0", "off-s1"]
    fake.fail = {"model-s1"}
    assert fake.main("sorting", "--seeds", "0", "1") == (1, names)
    results = json.loads((fake.output / "sorting" / "results.json").read_text())
    assert [(run["arm"], run["seed"]) for run in results["runs"]] == [
        ("off", 0),
        ("off", 1),
        ("model", 0),
        ("model", 1),
    ]
    assert results["minutes"] == 6 and "made to fail" in results["runs"][3]["failed"]
    assert results["command"].startswith("python scripts/ablate.py sorting --seeds 0 1")
    text = (fake.output / "sorting" / "table.md").read_text()
    assert (
        "| model | 2, 1 failed | 60.0% |" in text and "Two seeds prove nothing" in text and "6 minutes in all" in text
    )
    assert (fake.output / "sorting" / "curves.png").stat().st_size > 1000

    fake.fail = set()
    assert fake.main("sorting", "--seeds", "0", "1") == (0, ["model-s1"]), "the failed one again, the others are kept"
    assert fake.main("sorting", "--seeds", "0", "1", "2") == (0, ["model-s2", "off-s2"])
    assert fake.main("sorting", "--seeds", "0", "--arms", "off", "--set", "optim.lr=1e-5") == (0, ["off-s0"])
    assert fake.main("sorting", "--arms", "none") == (2, [])
    assert fake.main("no_such_suite") == (2, [])


def test_a_run_of_another_suite_with_the_same_config_is_not_made_again(scripts: Any, tmp_path: Path) -> None:
    schemes, remedies = (scripts.suites.load_suite(name) for name in ("schemes", "remedies"))

    def arguments(suite: Any, arm: str, seed: int) -> tuple[Path, list[str]]:
        run, folder = suite.run(arm, seed), tmp_path / suite.name
        return folder / run.name, scripts.ablate.arguments_of(suite, run, folder, [])

    folder, given = arguments(schemes, "qarl_grpo", 0)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    record = {"arguments": given, "config": scripts.ablate.config_of(given), "failed": None, "minutes": 3.0}
    (folder / "ablation_run.json").write_text(json.dumps(record))
    same, its = arguments(remedies, "model", 0)
    for _ in range(2):
        assert scripts.ablate.finished(same, its) == record | {"arguments": its, "minutes": 0.0}
        assert (same / "metrics.jsonl").read_text() == "{}\n"
    for arm, seed in (("model", 1), ("exact", 0), ("off", 0)):
        assert scripts.ablate.finished(*arguments(remedies, arm, seed)) is None
    (folder / "ablation_run.json").write_text(json.dumps(record | {"failed": "exit code 1"}))
    shutil.rmtree(same)
    assert scripts.ablate.finished(same, its) is None


def test_a_search_runs_to_its_verdict(fake: Any, scripts: Any) -> None:
    code, calls = fake.main("collapse")
    settings = scripts.suites.load_suite("collapse").settings
    assert code == 0 and calls == sorted(f"{setting}-off-s{seed}" for setting in settings for seed in (0, 1))
    assert f"Verdict: not found in {2 * len(settings)} runs" in (fake.output / "collapse" / "table.md").read_text()


def test_a_failed_run_is_no_collapse(fake: Any) -> None:
    fake.fail = {"as_it_is-off-s1"}
    assert fake.main("collapse") == (1, ["as_it_is-off-s0", "as_it_is-off-s1"])
    assert "Verdict: not decided: as_it_is-off-s1: exit code 2" in (fake.output / "collapse" / "table.md").read_text()


def test_what_is_finished_can_be_written_without_training(fake: Any) -> None:
    assert fake.main("sorting", "--seeds", "0") == (0, ["model-s0", "off-s0"])
    assert fake.main("sorting", "--finished-only") == (0, [])
    runs = json.loads((fake.output / "sorting" / "results.json").read_text())["runs"]
    assert [(run["arm"], run["seed"]) for run in runs] == [("off", 0), ("model", 0)]
    assert fake.main("collapse", "--finished-only") == (0, [])
    verdict = "not decided in 0 runs; the next is as_it_is-off-s0"
    assert json.loads((fake.output / "collapse" / "results.json").read_text())["verdict"] == verdict


def test_arguments_say_everything_about_a_run(scripts: Any, tmp_path: Path) -> None:
    suite = scripts.suites.load_suite("collapse")
    run = suite.run("off", 3, "lr2.5e-4_group128")
    arguments = scripts.ablate.arguments_of(suite, run, tmp_path, ["optim.lr=1e-5"])
    assert arguments[:4] == [
        "config=addition_chain.yaml",
        "name=lr2.5e-4_group128-off-s3",
        f"output_dir={tmp_path}",
        "seed=3",
    ]
    assert {"quant.align=off", "quant.group_size=128", "optim.lr=0.00025", "actor.loss=grpo"} <= set(arguments)
    assert arguments[-1] == "optim.lr=1e-5"


def test_a_training_that_fails_is_recorded(scripts: Any, tmp_path: Path) -> None:
    record = scripts.ablate.train(["config=no_such_config.yaml"], tmp_path / "run")
    assert record["failed"].startswith("exit code 2: error:") and (tmp_path / "run.log").is_file()
    assert scripts.ablate.finished(tmp_path / "run", ["config=no_such_config.yaml"]) is None


def test_a_bad_suite_is_refused(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts.suites, "SUITES", tmp_path)
    whole = "title: t\nquestion: q\nconfig: c\nseeds: [0]\narms: {a: {}}\n"
    for more, message in (
        ("sedes: [1]", "unknown: sedes"),
        ("baseline: b", "not an arm"),
        ("settings: {x: {}}", "off and model"),
    ):
        (tmp_path / "bad.yaml").write_text(f"{whole}{more}\n")
        with pytest.raises(UserError, match=message):
            scripts.suites.load_suite("bad")
    (tmp_path / "bad.yaml").write_text("title: t\n")
    with pytest.raises(UserError, match="missing: arms"):
        scripts.suites.load_suite("bad")


SUITES = sorted(path.stem for path in (ROOT / "scripts" / "suites").glob("*.yaml"))


@pytest.mark.parametrize("name", SUITES)
def test_every_run_of_a_suite_is_a_valid_config(
    scripts: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    suite = scripts.suites.load_suite(name)
    runs = [suite.run(arm, 0, setting) for setting in (suite.settings or ("",)) for arm in suite.arms]
    configs = [load_config(scripts.ablate.arguments_of(suite, run, tmp_path, [])) for run in runs]
    assert len({config.model_copy(update={"name": "x"}).model_dump_json() for config in configs}) == len(runs)


def test_the_suites_ask_what_the_papers_asked(scripts: Any) -> None:
    suites = {name: scripts.suites.load_suite(name) for name in SUITES}
    assert set(suites["objectives"].arms) >= {"tbpo", "grpo", "dual_clip", "gspo", "mis_gspo", "positive_only", "sapo"}
    assert list(suites["remedies"].arms) == ["off", "tis", "tis_rejection", "linears", "model", "exact"]
    for name in ("schemes", "remedies", "collapse", "sorting"):
        assert len(suites[name].seeds) == 4, name
    for name in ("objectives", "quantization"):
        assert len(suites[name].seeds) == 2 and "two seeds" in suites[name].title, name
    for suite in suites.values():
        for run in suite.runs() if not suite.settings else []:
            assert not any(isinstance(value, bool) for value in run.overrides.values()), "off must be quoted in YAML"


def test_a_suite_is_continued_from_its_saved_results(
    fake: Any, scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    monkeypatch.setattr(scripts.ablate, "SAVED", saved)
    fake.fail = {"off-s1"}
    assert fake.main("sorting", "--seeds", "0", "1", "--save")[0] == 1
    first = json.loads((saved / "ablate_sorting_cpu.json").read_text())
    shutil.rmtree(fake.output / "sorting")

    assert fake.main("sorting", "--seeds", "0", "1") == (1, ["model-s0", "model-s1", "off-s0", "off-s1"]), "not asked"
    shutil.rmtree(fake.output / "sorting")
    fake.fail = set()
    assert fake.main("sorting", "--seeds", "0", "1", "2", "--reuse-saved", "--save") == (
        0,
        ["model-s2", "off-s1", "off-s2"],
    ), "what failed and what is new"
    again = json.loads((saved / "ablate_sorting_cpu.json").read_text())
    kept = [run for run in again["runs"] if (run["arm"], run["seed"]) in {("off", 0), ("model", 0), ("model", 1)}]
    assert kept == [run for run in first["runs"] if not run["failed"]] and again["minutes"] == 9
    curves = kept[0]["curves"]
    assert curves["mismatch/k3"] == [[step, 1e-3] for step, _ in curves["mismatch/k3"]] and len(curves) == 3
    shutil.rmtree(fake.output / "sorting")
    assert fake.main("sorting", "--seeds", "0", "--reuse-saved", "--set", "optim.lr=1e-5")[1] == ["model-s0", "off-s0"]


def test_a_saved_run_serves_another_suite_without_its_minutes(scripts: Any, tmp_path: Path) -> None:
    entry = {"arm": "qarl_grpo", "seed": 1, "failed": None, "minutes": 7.0, "config_digest": "d", "accuracy_after": 0.9}
    zero = entry | {"arm": "model", "minutes": 0.0}
    for suite, one in (("remedies", zero), ("schemes", entry)):
        (tmp_path / f"ablate_{suite}_cpu.json").write_text(
            json.dumps({"suite": suite, "commit": "0123456789", "runs": [one]})
        )
    found = scripts.saved.saved_runs(tmp_path)["d"]
    assert found.pop("commit") == "01234567", "an entry without a commit has that of its file"
    assert found["suite"] == "schemes", "the one that was run there"
    mine = scripts.saved.reused(found, "collapse", {"setting": "x", "arm": "model", "seed": 1})
    assert mine == zero | {"setting": "x"}
    assert scripts.saved.reused(found, "schemes", {"arm": "qarl_grpo", "seed": 1}) == entry

    (tmp_path / "ablate_x_cpu.json").write_text('{"suite": "x"}')
    with pytest.raises(UserError, match=r"ablate_x_cpu\.json"):
        scripts.saved.saved_runs(tmp_path)


def test_the_digest_of_a_config_is_that_of_its_values(scripts: Any) -> None:
    digest = scripts.saved.config_digest
    assert digest({"a": 1, "b": {"c": 2.0}}) == digest({"b": {"c": 2.0}, "a": 1})
    assert len({digest({"a": value}) for value in (1, 2, None, "1", [1])}) == 5
