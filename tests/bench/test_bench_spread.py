"""The statistics of the benchmark of steps, with numbers by hand, and whether two runs agree."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from qarl.bench.__main__ import main
from qarl.bench.steps import agree, spread
from qarl.bench.steps.arguments import Arguments
from qarl.bench.steps.results import Key, results

# Quantiles of printed tables, 97.5%.
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365, 15: 2.131, 30: 2.042}


@pytest.mark.parametrize("freedom", STUDENT_T)
def test_student_t_is_that_of_printed_tables(freedom: int) -> None:
    assert spread.student_t(freedom) == pytest.approx(STUDENT_T[freedom], abs=6e-4)
    assert spread.two_sided_tail(STUDENT_T[freedom], freedom) == pytest.approx(
        0.05, abs=1e-4
    )  # of a quantile in three decimals


def test_tails_by_closed_formulae() -> None:
    """One degree of freedom: 1 - 2 atan(t) / pi. Two: 1 - t / sqrt(2 + t^2). Far out too, where Holm looks."""
    for t in (0.0, 0.3, 2.0, 50.0, 1e4):
        assert spread.two_sided_tail(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-6)
        closed = 2 / (math.sqrt(2 + t * t) * (math.sqrt(2 + t * t) + t))
        assert spread.two_sided_tail(t, 2) == pytest.approx(closed, rel=1e-6)
    assert spread.two_sided_tail(2.0, 1) > spread.two_sided_tail(2.0, 1.5) > spread.two_sided_tail(2.0, 2)


def test_rounds_of_one_launch_by_hand() -> None:
    """Standard deviation 1, t(2) = 4.3027: 4.3027 / sqrt(3)."""
    found = spread.spread([[1.0, 3.0, 2.0]])
    assert found["mean"] == 2 and found["samples"] == [[1, 3, 2]]
    assert found["high"] - 2 == pytest.approx(2.4841, abs=1e-4) == 2 - found["low"]
    assert spread.spread([[5.0, 5.0]]) == {"mean": 5, "low": 5, "high": 5, "samples": [[5, 5]]}


def test_launches_count_by_their_median() -> None:
    """Medians 1, 3 and 2: the same interval, whatever a disturbed round took."""
    found = spread.spread([[1.0, 1.0, 9.0], [3.0, 0.0, 3.5], [2.0, 2.0, 2.0]])
    assert (found["mean"], found["low"]) == (2, pytest.approx(2 - 2.4841, abs=1e-4))
    assert spread.units(found["samples"]) == [1, 3, 2]


@pytest.mark.parametrize(("launches", "rounds"), [(1, 6), (4, 2)])
def test_the_interval_holds_the_truth_in_19_of_20(launches: int, rounds: int) -> None:
    """Normal noise, and where there are launches one of each: 95% of 2000 intervals, give or take three standard
    errors of 0.5%. The rounds alone would promise too much."""
    draw = random.Random(0)
    hits, naive = 0, 0
    for _ in range(2000):
        offsets = [draw.gauss(0, 1) if launches > 1 else 0.0 for _ in range(launches)]
        samples = [[10 + offset + draw.gauss(0, 1) for _ in range(rounds)] for offset in offsets]
        found = spread.spread(samples)
        hits += found["low"] <= 10 <= found["high"]
        flat = spread.spread([[value for launch in samples for value in launch]])
        naive += flat["low"] <= 10 <= flat["high"]
    assert 0.935 < hits / 2000 < 0.965
    assert launches == 1 or naive / 2000 < 0.92


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that gets three times slower changes no ratio."""
    found = spread.ratios([[2.0, 4.0], [6.0, 8.0]], [[1.0, 2.0], [3.0, 4.0]])
    assert found == {"mean": 2, "low": 2, "high": 2, "samples": [[2, 2], [2, 2]]}


def test_extrapolation_by_hand() -> None:
    """Fixed 10, one second a layer: 12 at 2 layers, 14 at 4, 38 at 28; in a slower launch twice that."""
    shallow, deep = [[12.0], [24.0]], [[14.0], [28.0]]
    assert spread.extrapolate(shallow, deep, (2, 4), 28)["samples"] == [[38], [76]]
    layer, fixed = spread.per_layer(shallow, deep, (2, 4))
    assert layer["samples"] == [[1], [2]] and fixed["samples"] == [[10], [20]]


def test_welch_by_hand() -> None:
    """Means 2 and 6, variances 1 and 4 of three: t = 4 / sqrt(5/3) = 3.098, with 50/17 = 2.94 degrees of freedom
    ((5/3)^2 by ((1/3)^2 + (4/3)^2) / 2). With two and with three a t of 3.098 has tails of 9.0% and 5.3%."""
    a, b = spread.spread([[1.0, 2.0, 3.0]]), spread.spread([[4.0, 6.0, 8.0]])
    p = spread.p_value(a, b)
    assert p == spread.p_value(b, a) == pytest.approx(spread.two_sided_tail(4 / math.sqrt(5 / 3), 50 / 17))
    assert 0.053 < p < 0.0902 and p == pytest.approx(0.0545, abs=5e-4)
    assert spread.detectable(a, b, p) == pytest.approx(4)
    same = spread.spread([[1.0, 1.0]])
    assert spread.p_value(same, same) == 1 and spread.p_value(same, spread.spread([[2.0, 2.0]])) == 0


# Two runs.


def write(path: Path, *steps: float, scheme: str = "w8a8") -> str:
    """A file of one launch with one round for each of `steps`."""
    arguments = Arguments.parse("steps", ["device=cpu", "schemes=bf16,w8a8", "levels=off"])
    phases = [{"rollout": step / 2, "publish": 0.1, "step": step, "publish_share": 0.1 / step} for step in steps]
    answers = [{"phases": one, "peak_bytes": {}, "checks": {}} for one in phases]
    samples = {Key(scheme, "off", 30): [answers]}
    document = dict.fromkeys(agree.SAME, "same") | {"kind": "steps", "results": results(arguments, samples)}
    path.write_text(json.dumps(document))
    return str(path)


def test_two_runs_agree_within_their_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.json", 10.0, 10.1, 9.9)
    near, far = write(tmp_path / "b.json", 10.15, 10.25, 10.05), write(tmp_path / "c.json", 13.0, 13.1, 12.9)
    assert main(["agree", a, near]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("4 of 4 figures agree") and "\n0 have p < 5%" in printed.out
    assert "largest 1.5% (w8a8 off 30 phases" in printed.out and "a single launch" in printed.err
    assert main(["agree", a, far]) == 1
    printed = capsys.readouterr()
    assert "w8a8 off 30 phases step: 10 [" in printed.err and printed.out.startswith("1 of 4 figures agree")
    assert main(["agree", a, write(tmp_path / "d.json", 10.0, 10.1, 9.9, scheme="bf16")]) == 1
    assert "in one file only" in capsys.readouterr().err


def test_a_ratio_to_itself_is_no_figure() -> None:
    arguments = Arguments.parse("steps", ["device=cpu", "schemes=bf16,w8a8", "levels=off,linears"])
    answers = [[{"phases": {"step": step}, "peak_bytes": {}, "checks": {}} for step in (1.0, 2.0)]]
    keys = [Key("bf16", "off", 30), Key("w8a8", "off", 30), Key("w8a8", "linears", 30)]
    document = {"kind": "steps", "results": results(arguments, dict.fromkeys(keys, answers))}
    names = {name for name, _ in agree._figures(document, False)}
    assert names == {f"w8a8 {name} step" for name in ("off 30 speedup", "linears 30 speedup", "linears 30 to_off")}


def compared(draw: random.Random, figures: int, shift: float = 0.0) -> list[agree.Compared]:
    """Two runs of four launches; the first figure of the second run is `shift` standard deviations of a launch off."""

    def run(by: float) -> spread.Spread:
        return spread.spread([[10 + by + draw.gauss(0, 1)] for _ in range(4)])

    return [agree.Compared(str(i), run(0.0), run(shift if not i else 0.0)) for i in range(figures)]


def test_chance_alone_rarely_makes_runs_differ() -> None:
    """Of 100 pairs of runs with 40 figures each, 5% may differ in any (5 expected, three standard errors above: 11);
    one by one, some two of 40 figures would. A figure 15 standard deviations off is always found."""
    draw = random.Random(0)
    pairs: list[Any] = [compared(draw, 40) for _ in range(100)]
    assert sum(bool(agree.differing(pair)) for pair in pairs) <= 11
    assert 100 < sum(one.p < 0.05 for pair in pairs for one in pair) < 300
    for _ in range(20):
        assert [one.name for one in agree.differing(compared(draw, 40, shift=15.0))][:1] == ["0"]


def test_runs_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.json", 10.0, 10.1)
    other = json.loads(Path(a).read_text())
    (tmp_path / "b.json").write_text(json.dumps(other | {"device": "another"}))
    for phases in (result["phases"] for result in other["results"]):
        phases["step"]["median"] = phases["step"].pop("mean")
    (tmp_path / "old.json").write_text(json.dumps(other))
    for given in ([a], [a, str(tmp_path / "b.json")], [a, str(tmp_path / "none.json")], [a, a, "figures=some"]):
        assert main(["agree", *given]) == 2
    capsys.readouterr()
    assert main(["agree", a, str(tmp_path / "old.json")]) == 2 and "measure again" in capsys.readouterr().err
