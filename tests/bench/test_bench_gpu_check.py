"""scripts/gpu_check.py: verdicts on a benchmark's figures, the limit on each part, and the whole of it on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import gpu_check
from gpu_check import BOUNDS, verdicts


def entry(operation: str, m: int, name: str, seconds: float, copy: float = 0.5) -> dict[str, Any]:
    scheme, _, kernel = name.partition(" ")
    return {
        "operation": operation, "layer": "down", "n": 4096, "k": 12288, "m": m, "scheme": scheme, "kernel": kernel,
        "seconds": {"median": seconds}, "share_of_copy": copy, "share_of_bf16_product": 0.25,
    }  # fmt: skip


def verdict(results: list[dict[str, Any]], text: str) -> tuple[str, str]:
    ((_, _, figure, found),) = (line for line in verdicts(results) if line[0] == text)
    return found, figure


@pytest.mark.parametrize("bound", [bound for bound in BOUNDS if bound.against], ids=lambda bound: bound.text)
def test_speeds(bound: gpu_check.Bound) -> None:
    m = next(m for m in (16, 4096) if bound.serves(m))
    (kernel,), against, least = bound.kernels, bound.against or "", float(bound.text.split(": ")[1].split("x")[0])
    mine = entry(bound.operation, m, kernel, 1.0)
    for ratio, expected in ((least + 0.011, "met"), (least - 0.011, "missed")):
        found, figure = verdict([mine, entry(bound.operation, m, against, ratio)], bound.text)
        assert found == expected and figure.startswith(f"{ratio:.2f}x")
        assert ("50% of a copy's bytes/s, 25% of the BF16 product's" in figure) == (expected == "missed")
    assert verdict([mine], bound.text)[0] == "not measured"
    other = entry(bound.operation, m, against, 1.0)
    assert verdict([other], bound.text) == ("missed", f"{kernel} has no figure")
    assert verdict([entry("other", m, kernel, 1.0)], bound.text)[0] == "not measured"


def test_quantizers_are_held_to_a_copy() -> None:
    results = [entry("quantize", 0, "w4a16 triton", 1.0, copy=0.71), entry("quantize", 0, "fp8 triton", 1.0, 0.6)]
    found = {line[1]: line[3] for line in verdicts(results) if line[0].startswith("quantize")}
    assert found.pop("down [4096, 12288], w4a16 triton") == "met"
    assert len(found) == 5 and set(found.values()) == {"missed"}  # one too slow, four without a figure


def test_nothing_measured_is_said_for_every_bound() -> None:
    assert [line[0] for line in verdicts([])] == [bound.text for bound in BOUNDS]
    assert {line[3] for line in verdicts([])} == {"not measured"}


def test_nothing_that_a_part_started_outlives_its_limit(tmp_path: Path) -> None:
    """A process that a shell waits for, one that runs beside it, and one that it left behind."""
    late = f"(sleep 1; touch {tmp_path}/beside) & echo started; sh -c 'sleep 1; touch {tmp_path}/waited_for'; true"
    left = f"(sleep 1; touch {tmp_path}/left) & exit 0"
    assert gpu_check.run(["sh", "-c", left], dict(os.environ), 0.3) == ("", None)
    assert gpu_check.run(["sh", "-c", late], dict(os.environ), 0.3) == ("started\n", None)
    time.sleep(1.2)
    assert not list(tmp_path.iterdir())
    assert gpu_check.run(["sh", "-c", "echo wrong; exit 3"], dict(os.environ), 9.0) == ("wrong\n", 3)


@pytest.mark.parametrize("part", [part for part, cpu in gpu_check.BENCH if cpu])
def test_the_benchmarks_arguments_are_valid_on_both_devices(part: str) -> None:
    from qarl.bench.kernels.arguments import Arguments as Kernels
    from qarl.bench.steps.arguments import Arguments as Steps

    for cpu in (False, True):
        name, *given = gpu_check.command_of(part, cpu=cpu, folder=Path("f"))[3:]
        found = (Kernels if name == "kernels" else Steps).parse(name, given)
        assert found.device == ("cpu" if cpu else "cuda") and found.json == Path("f/report.json")


def test_a_part_without_its_packages_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_check.NEEDS, "bench", ("no_such_package",))
    found = gpu_check.run_part("bench", cpu=True, seconds=60)
    assert found["status"] == "left out" and "no_such_package not installed" in found["why"]
    assert gpu_check.run_part("environment", cpu=True, seconds=3)["why"] == "no time was left"


@pytest.mark.slow
def test_on_a_cpu(tmp_path: Path) -> None:
    command = ["scripts/gpu_check.sh", "--cpu", "--output", str(tmp_path), "--parts", "environment,bench,bench_experts"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=_environment(), timeout=400)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    (path,) = tmp_path.glob("cpu_check_*.json")
    document = json.loads(path.read_text())
    parts = document["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(parts, "passed")
    assert "w4a16: " in "".join(parts["environment"]["report"]["linear_kernels"])
    assert parts["bench"]["report"]["results"] and parts["bench_experts"]["report"]["results"]
    assert len(document["verdicts"]) >= len(BOUNDS)
    text = path.with_suffix(".md").read_text()
    assert "| bench | passed |" in text and "**experts, custom experts_layer, skewed [256, 256]**" in text


def test_it_says_which_part_failed(tmp_path: Path) -> None:
    """Without --cpu and without a GPU each part fails by itself, and the exit code says so."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = ["scripts/gpu_check.sh", "--output", str(tmp_path), "--parts", "environment,bench"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=_environment(), timeout=200)
    assert run.returncode == 1
    (path,) = tmp_path.glob("gpu_check_*.json")
    parts = json.loads(path.read_text())["parts"]
    assert [part["status"] for part in parts.values()] == ["failed", "failed"]
    assert "PyTorch sees no GPU" in "\n".join(parts["environment"]["output"] + parts["bench"]["output"])


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHON": sys.executable}
