"""A sample of `scripts/fuzz_config.py`: mutated configs end in a sane run, a warning or an error of ours."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from checkout import ROOT
from cpu_features import needs_vllm_cpu

from qarl.config import Config

SCRIPTS = ROOT / "scripts"
SECONDS = 20.0
"""A hang, on a machine that runs other tests at the same time; the script itself allows 2."""


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    """`fuzz_config` and `fuzz_cases`, imported as if run from their folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("fuzz_config"), importlib.import_module("fuzz_cases")


@needs_vllm_cpu
def test_no_mutated_config_ends_in_anything_but_sense_a_warning_or_an_error(
    scripts: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "outer" / "work"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    scripts[0].make_folder(work)
    outcomes = scripts[0].fuzz(1, range(200), seconds=SECONDS)
    result = scripts[0].summarize(1, outcomes)
    assert result["findings"] == []
    for stage, cases in (("doctor", 200), ("set-up", 100)):
        counts = result["stages"][stage]
        assert sum(counts.values()) == cases
        assert counts["refused"] > cases / 4 and counts["accepted"] > cases / 20 and counts["warned"] >= 2, counts


def test_cases_are_reproducible_and_visit_every_key(scripts: tuple[ModuleType, ModuleType]) -> None:
    draw = scripts[1].draw_case
    keys = dict(scripts[1].leaf_types())
    assert {"name", "verl", "optim.betas", "trainer.logger", "reward.function"} <= set(keys)
    assert set(Config.model_fields) == {key.partition(".")[0] for key in keys}
    cases = [draw(0, number) for number in range(3000)]
    assert cases[7] == draw(0, 7) != draw(1, 7)
    named = {argument.partition("=")[0] for case in cases for argument in case.arguments}
    assert set(keys) - {"verl"} <= named
    assert {"doctor.device", "doctor.json"} <= named
    assert sum(case.text != scripts[1].BASE for case in cases) > 200
    assert sum(len(case.arguments) > 1 for case in cases) > 500


def test_the_fuzzer_sees_what_it_is_for(
    scripts: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A raw exception, a hang, and nonsense without a word are findings."""
    fuzz = scripts[0]
    monkeypatch.chdir(tmp_path)
    case = scripts[1].Case(0, ())
    fuzzer = fuzz.Fuzzer.__new__(fuzz.Fuzzer)
    fuzzer.seconds, fuzzer.verbose, fuzzer.known, fuzzer.usual = 0.2, False, set(), set()

    def breaks(arguments: list[str]) -> int:
        raise ZeroDivisionError

    def hangs(arguments: list[str]) -> int:
        while True:
            pass

    assert fuzzer.run("x", breaks, case, None).where.startswith("ZeroDivisionError")
    assert fuzzer.run("x", hangs, case, None).where == "too long"
    assert fuzzer.run("x", lambda arguments: 2, case, None).where.startswith("a refusal without a fix")
    assert fuzzer.run("x", lambda arguments: 0, case, None).kind == "accepted"
    monkeypatch.setattr(fuzz, "unusual_values", lambda config: [])
    for argument in ("optim.lr=4096", "optim.eps=1e30", "rollout.n=1000000", "actor.ppo_epochs=9000000000000000000"):
        nonsense = scripts[1].Case(0, (argument,))
        assert fuzzer.run("x", lambda arguments: 0, nonsense, None).where.startswith("nonsense accepted"), argument
