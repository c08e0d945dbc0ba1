"""`qarl bench plan`: where its rates come from, which kernels it asks, and the pages that show what it predicts."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from qarl.bench.__main__ import main
from qarl.bench.plan.devices import SHEETS, assumed_rates, measured_rates
from qarl.bench.plan.multiplier import Measured, gpu_speeds, invariant_choice, multiplier
from qarl.bench.plan.predict import predict
from qarl.bench.plan.roofline import TERMS, by_phase
from qarl.bench.plan.work import Work
from qarl.config.level import Level
from qarl.errors import UserError
from qarl.kernels.cuda import layer_ops
from qarl.schemes import UNQUANTIZED, engine_scheme_names, get_scheme
from qarl.schemes.kernel_choice import KernelChoice

RESULTS = ROOT / "benchmarks" / "results"


def test_measured_rates(tmp_path: Path) -> None:
    entries = [
        {"operation": "linear", "scheme": scheme, "kernel": kernel, "m": m, "n": 10, "k": 10, "seconds": {"median": s}}
        for scheme, kernel, m, s in (("bf16", "bf16", 1, 1.0), ("bf16", "bf16", 100, 10.0), ("w8a8", "fast", 1, 0.5),
                                     ("w8a8", "slow", 1, 9.0), ("fp8", "reference", 1, 0.1))
    ]  # fmt: skip
    path = tmp_path / "k.json"
    path.write_text(
        json.dumps({"device": "d", "ceilings": {"copy_bytes_per_s": 5.0}, "results": entries})
    )
    measured = measured_rates(path)
    points = [Measured(1.0, 200.0), Measured(100.0, 2000.0)]
    assert measured.product["bf16"] == {"bf16": points} and not measured.on_gpu
    assert measured.product["w8a8"] == {
        "fast": [Measured(1.0, 400.0)],
        "slow": [Measured(1.0, 200 / 9)],
    }
    by = multiplier(measured.product, UNQUANTIZED)
    assert [by.flop_per_s(rows) for rows in (1, 9, 11, 10**6)] == [200, 200, 2000, 2000]
    assert multiplier(measured.product, get_scheme("w8a8")).kernel == "fast"
    assert measured.product["fp8"] == {"assumed": points} and measured.memory == 5.0
    said = dict.fromkeys(measured.sources)
    assert any("fp8" in line and "assumed" in line for line in said) and not any(
        "assumed" in line for line in said if line.startswith(("bf16", "w8a8", "memory"))
    )
    path.write_text(
        json.dumps({"device": "d", "ceilings": {"copy_bytes_per_s": 5.0}, "results": entries[2:]})
    )
    with pytest.raises(UserError, match="BF16"):
        measured_rates(path)


def test_rates_of_a_gpu_are_combined_with_its_data_sheet() -> None:
    """Small figures that contain the benchmark's own time are left out, and links come from the sheet."""
    of = measured_rates(RESULTS / "gpu_check_2026-11-27.json")
    assert of.on_gpu and of.memory == pytest.approx(4.243e12, rel=1e-3)
    assert (of.memory_bytes, of.link) == (141 * 10**9, 0.8 * 450e9)
    for kernels in of.product.values():
        assert all(
            [point.rows for point in points] == [512, 4096, 16384] for points in kernels.values()
        )
    gate_up = 2 * 4096 * 12288 * 4096
    down = gate_up
    assert of.product["bf16"]["bf16"][1].flop_per_s == pytest.approx(
        (gate_up + down) / (521.6e-6 + 513.5e-6), rel=1e-3
    )
    (row,) = predict(Work(schemes=("w4a16",), levels=(Level.OFF,), gpus=1), of)
    assert row["seconds"]["small_kernels"] > 0, "the terms of GPUs are on top"


def test_small_figures_count_if_graphs_were_timed(tmp_path: Path) -> None:
    def entry(m: int, timed: str) -> dict[str, object]:
        seconds = {"median": 1.0, "timed": timed}
        names = {"operation": "linear", "scheme": "bf16", "kernel": "bf16"}
        return names | {"m": m, "n": 10, "k": 10, "seconds": seconds}

    results = [entry(1, "graph"), entry(16, "stream"), entry(512, "stream")]
    report = {"device": "NVIDIA H300", "ceilings": {"copy_bytes_per_s": 5.0}, "results": results,
              "arguments": {"device": "cuda"}}  # fmt: skip
    path = tmp_path / "k.json"
    path.write_text(json.dumps({"parts": {"bench": {"report": report}}}))
    of = measured_rates(path, "a100")
    assert [point.rows for point in of.product["bf16"]["bf16"]] == [1, 512]
    assert of.memory_bytes == 80 * 10**9, "a GPU without a sheet takes that of gpu="


def test_kernels_say_the_speeds_that_an_h200_measured() -> None:
    document = json.loads((RESULTS / "gpu_check_2026-11-27.json").read_text())
    of = measured_rates(RESULTS / "gpu_check_2026-11-27.json")
    peaks = SHEETS["h200"].flop_per_s
    compared = []
    for name in engine_scheme_names():
        for kernel, speed in gpu_speeds(get_scheme(name)).items():
            points = of.product[name][speed.measured]
            shares = [(point.rows, point.flop_per_s / peaks[speed.rate]) for point in points]
            said = [(share.rows, pytest.approx(share.share, abs=6e-4)) for share in speed.shares]
            assert shares == said, (name, kernel)
            compared.append(kernel)
    assert {"bf16", "vllm_machete", "vllm_cutlass_int8", "vllm_cutlass_fp8"} <= set(compared)
    assert document["parts"]["bench"]["report"]["device"] == "NVIDIA H200"


def test_a_product_has_the_rate_of_its_rows() -> None:
    """Machete reaches 0.65 of the data sheet with a decode step's rows and 0.67 with an update's, cuBLAS 0.73 and 0.76;
    an A100, which nobody has measured, has one assumed share."""
    of = assumed_rates("h200").product
    shares = {
        (name, rows): multiplier(of, get_scheme(name)).flop_per_s(rows) / 989.4e12
        for name in ("w4a16", "bf16")
        for rows in (256, 16384)
    }
    assert shares == pytest.approx({("w4a16", 256): 0.650, ("w4a16", 16384): 0.668,
                                    ("bf16", 256): 0.734, ("bf16", 16384): 0.759})  # fmt: skip
    ampere = multiplier(assumed_rates("a100").product, get_scheme("w4a16"))
    assert ampere.kernel == "assumed" and ampere.flop_per_s(1) == 0.55 * 312e12


def test_the_kernels_of_model_are_those_whose_rows_are_independent() -> None:
    choices = {name: invariant_choice(get_scheme(name)) for name in engine_scheme_names()}
    assert choices["w8a8"] is KernelChoice.ENGINE, "int8 sums are exact"
    assert choices["fp8"] is KernelChoice.ENGINE, "CUTLASS never splits, and few rows are padded"
    assert choices["bf16"] is None, "nobody has shown for which shapes cuBLAS splits"
    assert choices["w4a16"] is KernelChoice.MACHETE, "faster than our own kernel"


def test_rows_say_what_is_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(scheme: str = "w8a8", **changes: Any) -> dict[str, Any]:
        work = Work(gpu="h200", schemes=(scheme,), levels=(Level.MODEL,), **changes)
        (row,) = predict(work, assumed_rates("h200"))
        return row

    unconfirmed = of(model="Qwen3-0.6B")["doubts"]
    assert len(unconfirmed) == bool(layer_ops.unconfirmed())
    monkeypatch.setattr(layer_ops, "unconfirmed", lambda experts=False: ())
    known = of(model="Qwen3-0.6B")
    assert known["doubts"] == [] and known["recomputed"] == pytest.approx(3 / 32), (
        "auto skips the pass"
    )
    plain = of("bf16", model="Qwen3-0.6B")
    assert plain["doubts"] and plain["recomputed"] == 1
    (split,) = of(model="Qwen3-0.6B", tensor_parallel=2)["doubts"]
    assert "not available" in split and "tensor_model_parallel_size=2" in split
    assert any("heads of 64" in doubt for doubt in of(model="Qwen2.5-0.5B")["doubts"])


def test_a_plan_for_a_mixture_of_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Low bits shorten decode, the publish and the memory of nothing else; the quotients stand beside."""
    path = tmp_path / "plan.json"
    arguments = [
        "model=qwen3-30b-a3b",
        "gpu=h800",
        "tensor_parallel=2",
        "schemes=bf16,w4a16",
        "levels=off,linears",
        f"json={path}",
    ]
    assert main(["plan", *arguments]) == 0
    base, off, linears = json.loads(path.read_text())["results"]
    assert (
        off["seconds"]["decode"] < base["seconds"]["decode"]
        and off["published_bytes"] < base["published_bytes"] / 3
    )
    assert (
        base["gathered_bytes"] > off["gathered_bytes"] > 1.5 * linears["gathered_bytes"] > 1e12
    ), "in low bits"
    assert off["memory_bytes"] < linears["memory_bytes"], (
        "the trainer holds the low-bit tensors too"
    )
    assert linears["too_much"] == (linears["memory_bytes"] > 80e9) and base["memory_bytes"] > 0
    said = capsys.readouterr().out
    assert (
        "Qwen3-30B-A3B on 8 x H800" in said and f"| {base['step'] / linears['step']:.2f} |" in said
    )
    assert linears["phases"] == by_phase(linears["seconds"])
    assert sum(linears["phases"].values()) == pytest.approx(linears["step"])
    assert [name for name in TERMS if f"\n| {name} |" not in said] == []


@pytest.mark.parametrize(
    ("number", "model", "without", "with_pass"),
    [
        (0, "Qwen3-8B", 1.099, 0.935),
        (0, "Qwen3-30B-A3B", 1.562, 1.373),
        (1, "Qwen3-8B", 1.132, 0.971),
        (1, "Qwen3-30B-A3B", 1.591, 1.406),
        (2, "Qwen3-8B", 1.291, 1.138),
        (3, "Qwen3-8B", 1.273, 1.119),
    ],
)
def test_what_exact_kernels_would_cost(
    number: int, model: str, without: float, with_pass: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the H200's rates and no constant changed: every bound holds without the pass, but for W4A16 at 8B with
    Machete on both sides, and none with it."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    tables = importlib.import_module("plan_tables")
    kernels = tables.EXACT[number]
    ratios = tables.exact_ratios(kernels, model)
    assert ratios == (pytest.approx(without, abs=6e-4), pytest.approx(with_pass, abs=6e-4))
    assert (ratios[0] >= kernels.bounds[model]) == ((number, model) != (0, "Qwen3-8B"))
    assert ratios[1] < kernels.bounds[model]


@pytest.mark.long
def test_the_pages_show_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables that scripts/plan_tables.py makes, and the commands that docs/lookup/results/benchmarks.md names."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    tables, replace = (
        importlib.import_module("plan_tables"),
        importlib.import_module("bench_table").replace_tables,
    )
    page, adapters = (
        (ROOT / "docs" / name).read_text(encoding="utf-8")
        for name in ("lookup/results/benchmarks.md", "do/lora.md")
    )
    assert all(replace(text, "plan", tables.table) == text for text in (page, adapters))
    assert re.findall(r"<!-- plan: (\w+) -->", page + adapters) == list(tables.TABLES)
    joined = page.replace("\n", " ")
    for command, settings in (
        ("plan gpus=1", tables.STEP | {"rates": tables.RATES.relative_to(ROOT)}),
        ("plan gpu=h100 gpus=8", tables.SPEED),
        ("plan model=Qwen3-30B-A3B", tables.LONG),
    ):
        words = dict(
            word.split("=") for word in joined.partition(f"`{command}")[2].partition("`")[0].split()
        )
        texts = {
            key: ",".join(map(str, v)) if isinstance(v, tuple) else str(v)
            for key, v in settings.items()
        }
        assert words.items() <= texts.items()
        assert texts.keys() - words.keys() <= {"gpu", "gpus", "model", "optimizer"}
