"""`qarl.bench`: arguments, single kernels and quantizers, what gets no figures, and tables from committed JSON."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from kernels_by_scheme import linear_kernels

from qarl.bench.__main__ import main
from qarl.bench.arguments import check_device
from qarl.bench.competitors import Competitor
from qarl.bench.expert_cases import ROUTINGS, ExpertLayer, experts
from qarl.bench.kernel_arguments import Arguments
from qarl.bench.linear_cases import BUILDERS, Layer
from qarl.bench.report import kernel_tables
from qarl.errors import UserError
from qarl.kernels.base import ExpertsShape

sys.path.insert(0, str(ROOT / "scripts"))
from bench_table import bench_table, replace_tables

SMALL = ["device=cpu", "shape=64x96", "group_size=32", "m=1,18", "seconds=0.001", "rounds=1"]
SOME = Arguments(device="cpu", group_size=32)


@pytest.mark.parametrize(
    ("part", "options", "message"),
    [
        ("kernels", "sheme=fp8", "did you mean scheme=...?"),
        ("kernels", "scheme=w4a15", "scheme=w4a15: Input should be 'w4a16', 'w8a8' or 'fp8'"),
        ("kernels", "model=qwen3-9b", "nearest: qwen3-8b"),
        ("kernels", "m", "m has no value"),
        ("kernels", "json=.", "it is a folder, but names the file to write"),
        ("kernels", "model=Qwen3-30B-A3B layer=down", "there is no layer to measure"),
        ("steps", "device=tpu", "device=tpu: Input should be 'cuda' or 'cpu'"),
        ("steps", "layers=31", "SmolLM2-135M has only 30"),
        ("steps", "n=1", "greater than or equal to 2"),
        ("steps", "response_length=9000", "9008, but the model has only 8192 positions"),
        ("steps", "model=Qwen3-30B-A3B", "mixture of experts"),
        ("steps", "model=./nowhere", "no config.json"),
        ("steps", "mini_batches=3", "mini_batches must divide prompts"),
        ("steps", "micro_batch=3", "micro_batch_size"),
        ("trainer", "gpu_memory_utilization=1.5", "gpu_memory_utilization"),
        ("plan", "gpu=h300", "gpu=h300: Input should be"),
        ("plan", "gpus=8 tensor_parallel=3", "tensor_parallel must divide gpus"),
        ("plan", "rates=nowhere.json", "not from qarl.bench kernels"),
        ("plan", "model=Qwen3-30B-A3B gpu=a100 gpu_memory_utilization=0.4", "has room for"),
    ],
)
def test_invalid_arguments(
    part: str, options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = [] if "device" in options or part == "plan" else ["device=cpu"]
    assert main([part, *device, *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


# One check, and what it withholds.


@pytest.mark.parametrize("operation", BUILDERS)
def test_every_competitor_computes_the_same(operation: str) -> None:
    torch.manual_seed(0)
    layer = Layer(torch.randn(64, 96).bfloat16(), SOME)
    cases = BUILDERS[operation](layer, 300)
    assert (
        cases
        and [(competitor.name, competitor.wrong()) for competitor in cases if competitor.wrong()]
        == []
    )
    assert all(competitor.bytes_moved > 0 for competitor in cases)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 150])
def test_every_competitor_of_experts_computes_the_same(routing: str, tokens: int) -> None:
    """150 tokens are more rows than are compared."""
    torch.manual_seed(0)
    layer = ExpertLayer(ExpertsShape(6, 2, 96, 64), SOME, torch.device("cpu"))
    cases = experts(layer, tokens, routing)
    assert {competitor.scheme for competitor in cases} == {"bf16", "w4a16", "w8a8", "fp8"}
    assert [competitor.wrong() for competitor in cases] == [None] * len(cases)
    assert all(competitor.bytes_moved > 0 and competitor.flop > 0 for competitor in cases)


@pytest.mark.parametrize("value", [1000.0, float("nan")])
def test_a_wrong_kernel_gets_no_figure(
    value: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """One wrong value in the last row, and one that is not finite."""
    kernel = linear_kernels("w4a16")[-1]
    right = kernel.linear

    def wrong(x: torch.Tensor, prepared: Any, bias: Any) -> torch.Tensor:
        y = right(x, prepared, bias)
        y[-1, -1] = value
        return y

    monkeypatch.setattr(kernel, "linear", staticmethod(wrong))
    path = tmp_path / "a.json"
    assert main(["kernels", *SMALL, "scheme=w4a16", "operation=linear", f"json={path}"]) == 1
    captured = capsys.readouterr()
    assert (
        "w4a16 reference" not in captured.out
        and "w4a16 reference: its relative error is" in captured.err
    )
    document = json.loads(path.read_text())
    assert (
        "reference" not in {entry["kernel"] for entry in document["results"]}
        and len(document["not_measured"]) == 2
    )


def test_a_kernel_that_raises_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> float:
        raise RuntimeError("out of resources")

    good = Competitor("bf16", "bf16", lambda: None, lambda: 0.0, 0.0, 1, 1)
    monkeypatch.setitem(
        BUILDERS,
        "linear",
        lambda *args: [good, Competitor("fp8", "new", fails, fails, 0.0, 1)],
    )
    assert main(["kernels", *SMALL, "operation=linear"]) == 1
    captured = capsys.readouterr()
    assert "bf16 bf16" in captured.out and "RuntimeError: out of resources" in captured.err


# Figures.


def test_json_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sub" / "kernels.json"
    assert main(["kernels", *SMALL, "scheme=w8a8", f"json={path}"]) == 0
    assert "64x96 linear m=18" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert (
        document["not_measured"] == {}
        and document["commit"]
        and document["versions"]["torch"] == version("torch")
    )
    entry = next(e for e in document["results"] if e["kernel"] == "reference" and e["m"] == 18)
    seconds = entry["seconds"]
    assert seconds["minimum"] <= seconds["median"] <= seconds["maximum"]
    assert entry["tflop_per_s"] == pytest.approx(2 * 18 * 64 * 96 / seconds["median"] / 1e12)
    assert entry["gb_per_s"] == pytest.approx(
        (18 * 96 * 2 + 18 * 64 * 2 + 64 * 96 + 64 * 4) / seconds["median"] / 1e9
    )
    base = next(
        e
        for e in document["results"]
        if e["scheme"] == "bf16" and e["operation"] == "linear" and e["m"] == 18
    )
    assert entry["baseline"] == "bf16 bf16" and base["speedup"] == 1
    assert entry["speedup"] == base["seconds"]["median"] / seconds["median"]
    table = kernel_tables(document)
    assert "| kernel | M=1 | M=18 |" in table and "| w8a8 reference |" in table
    assert document["commit"] in table and str(tmp_path) not in json.dumps(document)


PAGES = [
    "README.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES)
def test_committed_tables_are_those_of_the_committed_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert replace_tables(text, "bench", bench_table) == text, (
        "python scripts/bench_table.py " + page
    )


def test_a_device_that_is_not_there() -> None:
    other = "cpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(UserError, match="GPU"):
        check_device(other)
