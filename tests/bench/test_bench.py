"""The benchmark: arguments, what it refuses to measure, its JSON and tables; scripts/gpu_check.sh on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT

from qarl.bench import competitors, kernels, report
from qarl.bench.__main__ import main
from qarl.bench.arguments import Arguments
from qarl.bench.competitors import BUILDERS, Competitor, Layer
from qarl.bench.shapes import MODELS
from qarl.bench.timing import Times, measure
from qarl.errors import UserError
from qarl.kernels.cuda.vllm_ops import VllmMarlinLinear

SMALL = ["device=cpu", "shape=64x96", "group_size=32", "m=1,18", "seconds=0.01", "rounds=1"]


def test_arguments() -> None:
    arguments = Arguments.parse(["device=cuda", "model=qwen3-8b,qwen2.5-7b", "layer=down", "m=1,16384"])
    assert arguments.layers() == [("qwen3-8b", ("down", 4096, 12288)), ("qwen2.5-7b", ("down", 3584, 18944))]
    assert arguments.m == (1, 16384) and arguments.scheme == ("w4a16", "w8a8", "fp8", "w4a8")
    assert [model for model, _ in Arguments.parse(["device=cpu"]).layers()] == ["small"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sheme=fp8", "nearest: scheme"),
        ("scheme=w4a15", "nearest: w4a16"),
        ("model=qwen3-9b", "nearest: qwen3-8b"),
        ("m=many", "numbers"),
        ("m=0", "1 or more"),
        ("shape=64", "numbers"),
        ("m", "not key=value"),
    ],
)
def test_arguments_that_will_not_do(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=message):
        Arguments.parse([given])
    assert main(["kernels", given]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("model", "folder"),
    [("qwen3-8b", "Qwen3-8B"), ("qwen2.5-7b", "Qwen2.5-Math-7B"), ("qwen2.5-1.5b", "Qwen2.5-Math-1.5B")],
)
def test_shapes_are_those_of_the_models(model: str, folder: str) -> None:
    config = json.loads((ROOT / "qarl" / "bench" / "models" / folder / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    expected = {(q, hidden), (kv, hidden), (hidden, q), (inner, hidden), (hidden, inner)}
    assert {(layer.n, layer.k) for layer in MODELS[model]} == expected


def test_shapes_of_the_mixture_of_experts() -> None:
    config = json.loads((ROOT / "qarl" / "bench" / "models" / "Qwen3-30B-A3B" / "config.json").read_text())
    shapes = {layer.name: (layer.n, layer.k) for layer in MODELS["qwen3-30b-a3b"]}
    assert shapes["expert_gate_up"] == (config["moe_intermediate_size"], config["hidden_size"])
    assert shapes["expert_down"] == (config["hidden_size"], config["moe_intermediate_size"])
    assert shapes["q"] == (config["num_attention_heads"] * config["head_dim"], config["hidden_size"])


@pytest.mark.parametrize("operation", BUILDERS)
def test_every_competitor_computes_the_same(operation: str) -> None:
    torch.manual_seed(0)
    layer = Layer(torch.randn(64, 96).bfloat16(), Arguments(device="cpu", model=(), group_size=32), {})
    found = BUILDERS[operation](layer, 300)
    assert layer.failures == {} and found
    for competitor in found:
        assert competitor.error() <= competitor.allowed, competitor.name
        assert competitor.bytes_moved > 0


def test_marlin_is_measured_beside_machete(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(torch.randn(64, 96).bfloat16(), Arguments(device="cpu", model=(), group_size=32), {})
    for why_not, measured in (
        (None, True),
        ("here vLLM itself runs MacheteLinearKernel", True),
        ("here vLLM itself runs nothing (a reason)", False),
    ):
        monkeypatch.setattr(VllmMarlinLinear, "unavailable", staticmethod(lambda *args, why=why_not: why))
        assert (VllmMarlinLinear in list(layer.kernels("w4a16"))) == measured


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One wrong value in the last row, and one that is not finite, in a kernel of the registry: no figure for it."""
    kernel = competitors.LINEAR_KERNELS["w4a16"][-1]
    right = kernel.linear
    for wrong_value in (1000.0, float("nan")):

        def wrong(x: torch.Tensor, prepared: Any, bias: Any, value: float = wrong_value) -> torch.Tensor:
            y = right(x, prepared, bias)
            y[-1, -1] = value
            return y

        monkeypatch.setattr(kernel, "linear", staticmethod(wrong))
        assert main(["kernels", *SMALL, "scheme=w4a16", "operation=linear"]) == 1
        captured = capsys.readouterr()
        assert "w4a16 reference" not in captured.out and "w4a16 reference: its result is off" in captured.err


def test_a_kernel_that_raises_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: object) -> list[Competitor]:
        def call() -> object:
            raise RuntimeError("out of resources")

        def error() -> float:
            call()
            return 0.0

        good = Competitor("bf16", "bf16", lambda: None, lambda: 0.0, 0.0, 1, 1)
        return [good, Competitor("fp8", "new", call, error, 0.0, 1, 1)]

    monkeypatch.setitem(kernels.BUILDERS, "linear", fails)
    assert main(["kernels", *SMALL, "operation=linear"]) == 1
    captured = capsys.readouterr()
    assert "bf16 bf16" in captured.out and "RuntimeError: out of resources" in captured.err


def test_json_plot_and_tables(tmp_path: Path) -> None:
    path, image = tmp_path / "sub" / "kernels.json", tmp_path / "kernels.png"
    assert main(["kernels", *SMALL, "scheme=w8a8", f"json={path}", f"plot={image}"]) == 0
    document = json.loads(path.read_text())
    assert document["not_measured"] == {} and document["commit"] and document["versions"]["torch"] == torch.__version__
    assert document["ceilings"].keys() == {"copy_bytes_per_s", "bf16_flop_per_s"}
    entry = next(e for e in document["results"] if e["kernel"] == "reference" and e["m"] == 18)
    seconds = entry["seconds"]
    assert seconds["minimum"] <= seconds["p10"] <= seconds["median"] <= seconds["p90"]
    assert entry["tflop_per_s"] == pytest.approx(2 * 18 * 64 * 96 / seconds["median"] / 1e12)
    assert entry["gb_per_s"] == pytest.approx((18 * 96 * 2 + 18 * 64 * 2 + 64 * 96 + 64 * 4) / seconds["median"] / 1e9)
    assert image.read_bytes()[:4] == b"\x89PNG"
    table = report.tables(document)
    assert "| kernel | M=1 | M=18 |" in table and "| w8a8 reference |" in table
    assert document["commit"] in table and document["device"] in table


def test_tables_in_markdown_come_from_json(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    from bench_table import rewrite

    main(["kernels", *SMALL, "scheme=w4a16", "operation=linear", f"json={tmp_path / 'a.json'}"])
    blocks = "<!-- bench: a.json -->\nold\n<!-- /bench -->\n<!-- bench: b.json -->\nkept\n<!-- /bench -->\n"
    text = f"before\n{blocks}after\n"
    new, missing = rewrite(text, tmp_path)
    assert missing == ["b.json"] and "kept" in new and "old" not in new
    assert new.startswith("before\n<!-- bench: a.json -->\n") and new.endswith("<!-- /bench -->\nafter\n")
    assert rewrite(new, tmp_path)[0] == new


def test_calls_are_measured_in_turn() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    times = measure(calls, torch.device("cpu"), seconds=0.0, rounds=3)
    assert order == ["a", "a", "b", "b", *"ababab"]
    assert times["a"].calls == 3
    assert Times.of([3.0, 1.0, 2.0]) == Times(2.0, 1.0, 3.0, 1.0, 3)


@pytest.mark.slow
def test_gpu_check_on_a_cpu(tmp_path: Path) -> None:
    command = ["scripts/gpu_check.sh", "--cpu", "--output", str(tmp_path), "--parts", "environment,correctness,bench"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=_environment(), timeout=400)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    (path,) = tmp_path.glob("cpu_check_*.json")
    parts = json.loads(path.read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(parts, "passed")
    assert "w4a16: " in "".join(parts["environment"]["report"]["linear_kernels"])
    assert parts["bench"]["report"]["results"] and len(parts["correctness"]["report"]) > 40
    assert "| bench | passed |" in path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_gpu_check_says_which_part_failed(tmp_path: Path) -> None:
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
