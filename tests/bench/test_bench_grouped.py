"""The benchmark of mixture-of-experts products on a small layer: every competitor right, and what is written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qarl.bench import grouped
from qarl.bench.__main__ import main
from qarl.bench.arguments import Arguments
from qarl.bench.shapes import EXPERTS, Experts
from qarl.bench.steps.models import MODELS

SMALL = Experts(experts=6, top_k=2, hidden=96, intermediate=64)


def layer(shape: Experts = SMALL) -> grouped.ExpertLayer:
    torch.manual_seed(0)
    return grouped.ExpertLayer(shape, Arguments(device="cpu", model=(), group_size=32), torch.device("cpu"))


def test_the_experts_are_those_of_the_model() -> None:
    path = MODELS / "Qwen3-30B-A3B" / "config.json"
    config = json.loads(path.read_text())
    keys = ("num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size")
    assert EXPERTS["qwen3-30b-a3b"] == tuple(config[key] for key in keys)


@pytest.mark.parametrize("routing", grouped.ROUTINGS)
@pytest.mark.parametrize("operation", grouped.BUILDERS)
@pytest.mark.parametrize("tokens", [1, 150])
def test_every_competitor_computes_the_same(operation: str, routing: str, tokens: int) -> None:
    """150 tokens are more rows than are compared."""
    made = layer()
    parts = ("layer",) if operation == "experts" else ("gate_up", "down")
    for part in parts:
        found = grouped.BUILDERS[operation](made, part, tokens, routing)
        assert {competitor.scheme for competitor in found} == {"bf16", "w4a16", "w8a8", "fp8"}
        for competitor in found:
            assert competitor.error() <= competitor.allowed, competitor.name
            assert competitor.bytes_moved > 0 and competitor.flop > 0
    assert made.failures == {}


def test_routings() -> None:
    made = layer(Experts(experts=16, top_k=4, hidden=32, intermediate=32))
    for routing in grouped.ROUTINGS:
        weights, ids = made.topk(400, routing)
        assert all(len(set(row)) == 4 for row in ids.tolist()), "a token's experts are different ones"
        torch.testing.assert_close(weights.sum(1), torch.ones(400))
        assert torch.equal(ids, made.topk(400, routing)[1])
        counts = ids.flatten().bincount(minlength=16).tolist()
        if routing == "balanced":
            assert set(counts) == {100}
        else:
            assert counts[0] > 3 * counts[-1] > 0 and counts[0] == max(counts)


def test_a_wrong_product_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = grouped.grouped.product

    def wrong(*args: torch.Tensor) -> torch.Tensor:
        y = right(*args)
        y[-1] *= 2
        return y

    monkeypatch.setattr(grouped.grouped, "product", wrong)
    arguments = ["device=cpu", "model=small", "operation=grouped_linear", "scheme=w8a8", "m=5", "seconds=0.001"]
    assert main(["kernels", *arguments, "rounds=1"]) == 1
    captured = capsys.readouterr()
    assert "bf16 bf16" in captured.out and "w8a8" not in captured.out.replace("w8a8_", "")
    assert "its result is off" in captured.err


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "grouped.json"
    arguments = ["device=cpu", "model=small", "operation=experts,grouped_linear", "scheme=w4a16", "m=3", "rounds=1"]
    assert main(["kernels", *arguments, "seconds=0.001", f"json={path}"]) == 0
    results = json.loads(path.read_text())["results"]
    layers = {(entry["operation"], entry["layer"], entry["n"], entry["k"]) for entry in results}
    assert layers == {
        (operation, f"experts_{part}, {routing}", n, k)
        for routing in grouped.ROUTINGS
        for operation, part, n, k in (
            ("experts", "layer", 256, 256),
            ("grouped_linear", "gate_up", 256, 256),
            ("grouped_linear", "down", 256, 128),
        )
    }
    entry = next(e for e in results if e["layer"] == "experts_down, balanced" and e["scheme"] == "w4a16")
    assert entry["baseline"] == "bf16 bf16" and entry["speedup"] > 0
    # 3 tokens, 2 rows each, six of eight experts: rows in and out, codes, scales
    moved = 6 * 2 * (128 + 256) + 6 * (256 * 64 + 256 * 2)
    assert entry["gb_per_s"] == pytest.approx(moved / entry["seconds"]["median"] / 1e9)
