"""`qarl.bench steps | trainer | publish`: launches in turn, what withholds figures, Ctrl-C, report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from cpu_features import needs_w4a16_cpu
from random_models import save_random_model
from torch import nn

from qarl.bench import steps
from qarl.bench.__main__ import main
from qarl.bench.measured_process import (
    PublishBench,
    StepBench,
    TrainerBench,
    WrongNumbers,
    check_linears,
    move_weights,
)
from qarl.bench.model import find_model, write_model
from qarl.bench.step_arguments import Arguments, Case
from qarl.metrics.plots import phases_of
from qarl.quant.linear import QuantLinear


def parse(*options: str, part: str = "steps") -> Arguments:
    return Arguments.parse(part, ["device=cpu", *options])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's copy as the benchmark makes it."""
    made = tmp_path_factory.mktemp("models")
    write_model(find_model(str(save_random_model(made / "model"))), 2, made / "copy")
    return made / "copy"


def tiny(folder: Path, *options: str, part: str) -> Arguments:
    sizes = ("prompts=2", "n=4", "prompt_length=4", "response_length=8")
    return parse(f"model={folder}", *sizes, *options, part=part)


# Launches, with fake processes.


def figures(seconds: float, **more: Any) -> dict[str, Any]:
    phases = {"step": seconds, "rollout": seconds / 2, "prefill": seconds / 4, "decode": seconds / 4,
              "old_log_prob": 1.0, "update": 2.0, "publish": seconds / 10}  # fmt: skip
    return {"rounds": [phases, phases], "peak_bytes": int(seconds * 2**30), "level_applied": "off",
            "kernels": [], **more}  # fmt: skip


Launch = Callable[[Arguments, Case, Path], dict[str, Any]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[[Launch], list[Case]]:
    """Puts a function in the place of processes; the list of cases fills as they are launched."""

    def use(launch: Launch) -> list[Case]:
        order: list[Case] = []

        def logged(arguments: Arguments, case: Case, folder: Path) -> dict[str, Any]:
            order.append(case)
            return launch(arguments, case, folder)

        monkeypatch.setattr(steps, "launch", logged)
        monkeypatch.setattr(steps, "write_model", lambda source, layers, folder: 135_000_000)
        return order

    return use


def test_launches_take_turns_and_figures_are_medians_over_them(
    launches: Callable[[Launch], list[Case]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: dict[str, int] = {}

    def launch(arguments: Arguments, case: Case, folder: Path) -> dict[str, Any]:
        taken[case.scheme] = taken.get(case.scheme, 0) + 1
        return figures({"bf16": 10.0, "w8a8": 5.0}[case.scheme] * (1, 3, 2)[taken[case.scheme] - 1])

    order, path = launches(launch), tmp_path / "sub" / "a.json"
    assert main(["steps", "device=cpu", "schemes=w8a8,bf16", "levels=off", f"json={path}"]) == 0
    bf16, w8a8 = Case("bf16", "off"), Case("w8a8", "off")
    assert order == [bf16, w8a8, w8a8, bf16, bf16, w8a8]
    document = json.loads(path.read_text())
    step = document["results"][1]["phases"]["step"]
    assert step == {
        "samples": [[5, 5], [15, 15], [10, 10]],
        "median": 10,
        "minimum": 5,
        "maximum": 15,
    }
    assert document["results"][1]["peak_bytes"]["step"] == 15 * 2**30
    assert document["model"]["num_hidden_layers"] == 30 and document["workload"]["sequences"] == 32
    assert str(tmp_path) not in json.dumps(document) and document["commit"] and document["date"]
    said = capsys.readouterr().out
    assert "| w8a8 | `off` | 5 (2.5-7.5) |" in said and "| 10 (5-15) | 10.0% |" in said
    assert "| w8a8 | `off` | 2.00 (2.00-2.00) |" in said, "ratios are taken launch by launch"
    assert "Medians over 3 launches" in said and said.startswith(
        "SmolLM2-135M, random weights: 135M"
    )


def test_adapters_beside_all_weights(
    launches: Callable[[Launch], list[Case]], capsys: pytest.CaptureFixture[str]
) -> None:
    """`off` and `linears` have cases where a run has them."""
    order = launches(lambda arguments, case, folder: figures(3.0 if case.lora_r else 4.0))
    options = ["schemes=bf16,fp8", "levels=off,linears", "lora_r=32,0", "launches=1"]
    assert main(["steps", "device=cpu", *options]) == 0
    fp8 = [Case("fp8", "off"), Case("fp8", "linears"), Case("fp8", "linears", 32)]
    assert order == [Case("bf16", "off"), Case("bf16", "off", 32), *fp8]
    mine = [
        line for line in capsys.readouterr().out.splitlines() if " (ran as `off`) | 32 |" in line
    ]
    beside = "| 1.00 (1.00-1.00) | 0.75 (0.75-0.75) |"
    assert [line.endswith(beside) for line in mine] == [False, True, False], (
        "seconds, ratios, memory"
    )
    assert (
        main(["publish", "device=cpu", "lora_r=8"]) == 2
        and "no adapters" in capsys.readouterr().err
    )


def test_a_case_with_wrong_numbers_gets_no_figures(
    launches: Callable[[Launch], list[Case]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even those of its earlier launches; the others are measured."""

    def launch(arguments: Arguments, case: Case, folder: Path) -> dict[str, Any]:
        if case.scheme == "fp8" or (case.level == "linears" and order.count(case) == 2):
            return {"error": "its numbers are wrong"}
        return figures(1.0)

    order, path = launches(launch), tmp_path / "a.json"
    options = ["schemes=bf16,w8a8,fp8", "levels=off,linears", "launches=3", f"json={path}"]
    assert main(["steps", "device=cpu", *options]) == 1
    document = json.loads(path.read_text())
    assert {(r["scheme"], r["level"]) for r in document["results"]} == {
        ("bf16", "off"),
        ("w8a8", "off"),
    }
    assert document["failures"].keys() == {
        "w8a8, level linears",
        "fp8, level off",
        "fp8, level linears",
    }
    assert order.count(Case("w8a8", "linears")) == 2 and order.count(Case("fp8", "off")) == 1
    captured = capsys.readouterr()
    assert "no figures: fp8, level off: its numbers are wrong" in captured.err
    assert "| w8a8 | `linears` |" not in captured.out


def test_ctrl_c_keeps_the_finished_launches(
    launches: Callable[[Launch], list[Case]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(arguments: Arguments, case: Case, folder: Path) -> dict[str, Any]:
        if len(order) > 3:
            raise KeyboardInterrupt
        return figures(1.0)

    order, path = launches(launch), tmp_path / "a.json"
    assert main(["steps", "device=cpu", "schemes=bf16,w8a8", "levels=off", f"json={path}"]) == 130
    captured = capsys.readouterr()
    assert "interrupted" in captured.err and "Traceback" not in captured.err
    results = json.loads(path.read_text())["results"]
    assert [len(result["phases"]["step"]["samples"]) for result in results] == [1, 2]
    assert "| w8a8 | `off` | 0.5" in captured.out and "| 1.00 (1.00-1.00) |" in captured.out


@pytest.mark.slow
def test_ctrl_c_ends_the_process_too(folder: Path) -> None:
    """The real thing, as a terminal sends it: to the whole group, while the child is still importing."""
    command = [
        sys.executable,
        "-m",
        "qarl.bench",
        "trainer",
        "device=cpu",
        f"model={folder}",
        "schemes=bf16",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                               start_new_session=True)  # fmt: skip
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any(line.startswith("launch 1 of 3") for line in lines)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err, err
    for _ in range(100):  # multiprocessing's own helper ends a little later
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("a process outlives the benchmark")


def test_a_process_that_raises_is_a_failure(folder: Path) -> None:
    missing = folder / "nowhere"
    assert (
        "nowhere"
        in steps.launch(tiny(folder, part="trainer"), Case("bf16", "off"), missing)["error"]
    )


# The trainer's own phases, and the check.


def test_the_trainer_times_the_parts_of_its_update_and_multiplies_by_low_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = TrainerBench(tiny(folder, part="trainer"), Case("w8a8", "linears"), str(folder))
    before = [p.detach().clone() for p in bench.policy.model.parameters()]
    phases = bench.round()
    parts = {"forward", "backward", "optimizer", "quantize"}
    assert phases.keys() == {"old_log_prob", "update", "step", *parts} and all(
        phases[part] > 0 for part in parts
    )
    assert sum(phases[part] for part in parts) <= phases["update"] < phases["step"]
    assert any(
        not torch.equal(a, b) for a, b in zip(before, bench.policy.model.parameters(), strict=True)
    )
    check_linears(bench.policy, None)
    stacked = phases_of([{f"timing_s/{name}": value for name, value in phases.items()}])
    assert stacked == ["old_log_prob", "update", "quantize"], (
        "a plot of phases would count those of the update twice"
    )

    monkeypatch.setattr(
        QuantLinear, "forward", lambda layer, x: nn.functional.linear(x, layer.weight, layer.bias)
    )
    with pytest.raises(
        WrongNumbers,
        match=r"layers\.0\.self_attn\.q_proj: the trainer differs from the reference by",
    ):
        check_linears(bench.policy, None)


@pytest.fixture(scope="module", params=["bf16", pytest.param("w4a16", marks=needs_w4a16_cpu)])
def publishing(request: pytest.FixtureRequest, folder: Path) -> Iterator[PublishBench]:
    bench = PublishBench(tiny(folder, part="publish"), Case(request.param, ""), str(folder))
    yield bench
    bench.engine.close()


@pytest.mark.vllm
def test_engines_that_hold_other_weights(
    publishing: PublishBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One linear; all of them, after a publish that writes nothing; and then those of the trainer again."""
    phases = publishing.round()
    assert (
        phases["publish"] > 0
        and {f"publish.{part}" for part in ("validate", "apply")} <= phases.keys()
    )
    check_linears(publishing.policy, publishing.engine)
    with torch.no_grad():
        publishing.policy.model.model.layers[1].mlp.up_proj.weight[5].mul_(1.25)
    with pytest.raises(WrongNumbers, match=r"layers\.1\.mlp\.up_proj: the engine differs"):
        check_linears(publishing.policy, publishing.engine)
    publishing.publish()
    check_linears(publishing.policy, publishing.engine)
    move_weights(publishing.policy, 9)
    with pytest.raises(WrongNumbers, match=r"layers\.0\.self_attn\.q_proj: the engine differs"):
        check_linears(publishing.policy, publishing.engine)
    publishing.publish()
    check_linears(publishing.policy, publishing.engine)


@pytest.mark.vllm
@pytest.mark.parametrize("lora_r", [0, 8])
def test_a_training_step(folder: Path, lora_r: int) -> None:
    """The trainer's own step, at the weights that it moved and published."""
    bench = StepBench(tiny(folder, part="steps"), Case("w8a8", "model", lora_r), str(folder))
    assert (bench.policy.adapters is not None) == bool(lora_r)
    with bench.trainer.engine:
        bench.round()  # the engine's first request takes longer
        phases = bench.round()
        assert bench.trainer.step == bench.trainer.engine.weight_version == 2
        parts = (
            "prefill",
            "decode",
            "old_log_prob",
            "forward",
            "backward",
            "optimizer",
            "quantize",
            "publish",
        )
        assert (
            all(phases[part] > 0 for part in parts)
            and phases["rollout"] + phases["update"] < phases["step"]
        )
        check_linears(bench.policy, bench.engine)
        assert bench.policy.align == "exact"
        bench.length = 9
        with pytest.raises(WrongNumbers, match="not 9 tokens long"):
            bench.round()
        if stored := bench.policy.model.get_submodule("model.layers.1.mlp.up_proj").stored:
            stored["weight"]["weight_scale"].mul_(
                1.25
            )  # this base is in the trainer's memory and in the engine's
            with pytest.raises(WrongNumbers, match=r"layers\.1\.mlp\.up_proj: the engine differs"):
                check_linears(bench.policy, bench.engine)
