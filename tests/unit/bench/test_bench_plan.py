"""`qarl.bench plan`: the roofline against numbers worked by hand, and its stated error against committed steps."""

from __future__ import annotations

import importlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from checkout import ROOT

from qarl.bench.__main__ import main
from qarl.bench.plan.devices import Measured, Rates, measured_rates
from qarl.bench.plan.predict import ERROR
from qarl.bench.plan.roofline import TERMS, Roofline, by_phase
from qarl.bench.plan.work import Work
from qarl.bench.report import summary
from qarl.checks.model_size import ModelSize
from qarl.config.optimizers import Optimizer, register, unregister
from qarl.errors import UserError
from qarl.schemes import engine_scheme_names, get_scheme

RESULTS = ROOT / "benchmarks" / "results"
SMALL = ModelSize(
    layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=100
)
"""A block: q [64, 64], k and v [32, 64], o [64, 64], gate and up [128, 64], down [64, 128]: 36864 weights, 73728 in
both. lm_head 6400; 73728 + 2 * 6400 + 5 * 64 = 86848 parameters."""
WEIGHTS, HEAD, PARAMETERS = 73728, 6400, 86848
MOE = replace(SMALL, experts=4, experts_per_token=2, moe_intermediate=32, sparse_layers=(0, 1))
"""An expert: 3 x 32 x 64 = 6144 weights; four in each layer, and 12288 of attention."""
WORK = Work(
    prompts=2,
    n=2,
    prompt_length=8,
    response_length=(25,),
    micro_batch=2,
    gpus=1,
    rates=Path("k.json"),
)


def rates(flop: float = math.inf, memory: float = math.inf, **changes: float) -> Rates:
    product = dict.fromkeys(engine_scheme_names(), (Measured(1.0, flop),))
    return Rates("one", product, memory, (), **changes)  # type: ignore[arg-type]  # `changes` are numbers by name


def step(size: ModelSize, of: Rates, work: Work = WORK, scheme: str = "bf16", level: str = "linears",
         kv_tokens: float = math.inf) -> dict[str, float]:  # fmt: skip
    of_weights = get_scheme(scheme, 32)
    low_bit = of_weights.quantized and level != "off"
    step = Roofline(size, of, work, of_weights, kv_tokens, low_bit=low_bit).step()
    return step.seconds | {"gathered": step.gathered, "published": step.published}


def test_arithmetic_by_hand() -> None:
    """One FLOP a second. Four rows of 33 tokens, of which 25 are scored; attention 2 x 33² x 64 a layer and row."""
    costs = step(SMALL, rates(flop=1.0))
    one_row = 2 * 33 * WEIGHTS + 2 * 25 * HEAD + 2 * 33**2 * 64 * 2
    assert costs["old_log_prob"] == costs["forward"] == 4 * one_row
    assert costs["backward"] == 2 * 4 * one_row
    prefill = 2 * 8 * WEIGHTS + 2 * 8**2 * 64 * 2 + 2 * HEAD
    assert costs["prefill"] == 4 * prefill, (
        "without a prefix cache every response has its prompt prefilled"
    )
    assert costs["decode"] == 24 * 4 * 2 * (WEIGHTS + HEAD)
    assert costs["optimizer"] == costs["publish"] == costs["communication"] == 0
    assert costs.keys() <= TERMS.keys() | {"gathered", "published"}, "each term has a phase"


@pytest.mark.parametrize(
    ("scheme", "bytes_a_weight"), [("bf16", 2.0), ("w8a8", 1.0), ("w4a16", 0.5 + 2 / 32)]
)
def test_memory_by_hand(scheme: str, bytes_a_weight: float) -> None:
    """One byte a second, and infinite arithmetic: 24 decode steps read all weights, lm_head in BF16, and the caches."""
    costs, off = (
        step(SMALL, rates(memory=1.0), scheme=scheme, level=level) for level in ("linears", "off")
    )
    extra = {"bf16": 0, "w8a8": 4 * 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64), "w4a16": 16 * 14}[
        scheme
    ]
    wire = bytes_a_weight * WEIGHTS + extra
    cache = 4 * (8 + 12.5) * SMALL.kv_bytes_per_token()
    assert costs["decode"] == pytest.approx(24 * (wire + 2 * HEAD + cache))
    assert (
        costs["published"] == wire + 2 * (PARAMETERS - WEIGHTS)
        and costs["publish"] == 4 * costs["published"]
    )
    assert costs["optimizer"] == 4 * 38 * PARAMETERS
    quantizer = 0 if scheme == "bf16" else 2 * WEIGHTS + wire
    assert (costs["quantize"], off["quantize"]) == (quantizer * 4, quantizer), (
        "at off only the publish quantizes"
    )
    assert off["forward"] == step(SMALL, rates(memory=1.0))["forward"], (
        "at off the trainer multiplies in BF16"
    )


def test_links_by_hand() -> None:
    """Two GPUs, one micro-batch each: three gathers of the BF16 weights' other half, half of the FP32 gradients."""
    work = replace(WORK, gpus=2, rates=None)
    costs = step(SMALL, rates(link=10.0), work)
    passes = 3 * PARAMETERS + 2 * PARAMETERS
    assert costs["gathered"] == passes + PARAMETERS, "and the publish gathers once more"
    assert costs["communication"] == passes / 10 and costs["publish"] == PARAMETERS / 10
    hidden = step(SMALL, rates(flop=1e3, link=10.0), work)
    beside = 2 * hidden["forward"] + hidden["backward"]
    assert hidden["communication"] == pytest.approx(max(passes / 10 - beside, 0))
    wire = step(SMALL, rates(), work, "w4a16")["published"]
    for level, weights in (("linears", wire), ("off", 2 * PARAMETERS)):
        low_bit = step(SMALL, rates(), work, "w4a16", level)
        assert low_bit["gathered"] == (3 * weights + 4 * PARAMETERS + wire) / 2, (
            "the publish gathers low bits"
        )
    far = step(SMALL, rates(link=10.0, network=1.0), replace(work, gpus=16, prompts=16))
    assert far["communication"] == pytest.approx(far["gathered"] - 2 * PARAMETERS * 15 / 16), (
        "between nodes"
    )


@pytest.mark.parametrize(("orthogonalizes", "like"), [(True, "muon"), (False, "adamw")])
def test_an_optimizer_of_a_plugin_is_planned(orthogonalizes: bool, like: str) -> None:
    register(Optimizer("toy", "toy:Toy", orthogonalizes=orthogonalizes))
    try:
        work = Work.parse("plan", ["optimizer=toy"])
        seconds = [
            step(SMALL, rates(flop=1.0, memory=1.0), replace(work, optimizer=name))["optimizer"]
            for name in ("toy", like)
        ]
    finally:
        unregister("toy")
    assert seconds[0] == seconds[1] > 0
    with pytest.raises(UserError, match="toy"):
        Work.parse("plan", ["optimizer=toy"])


def test_adapters_by_hand() -> None:
    """Rank 8: 8 x (N + K) weights of each linear. Gradients of the inputs only, and nothing is quantized again."""
    adapters = 8 * 2 * (2 * 128 + 2 * 96 + 3 * 192)
    work = replace(WORK, lora_r=8)
    all_weights, base = (step(SMALL, rates(flop=1.0), of) for of in (WORK, work))
    assert all_weights["backward"] - base["backward"] == 4 * (2 * 33 * WEIGHTS + 2 * 25 * HEAD)
    costs = step(SMALL, rates(memory=1.0), work, "w4a16")
    assert costs["published"] == 2 * adapters and costs["quantize"] == 0
    assert costs["optimizer"] == 4 * 38 * adapters
    low_bit = step(SMALL, rates(), replace(work, gpus=2), "w4a16")
    passes = 3 * (2 * (PARAMETERS - WEIGHTS) + 2 * adapters) + 4 * adapters
    assert low_bit["gathered"] == (passes + 2 * adapters) / 2, "each GPU has the whole base"


def test_gpus_engines_and_room() -> None:
    """Half the responses each; a prompt once; blocks again in the backward; a small KV cache takes more steps."""
    on_gpu = replace(WORK, rates=None)
    one_gpu, two_gpus = (
        step(SMALL, rates(flop=1.0), replace(on_gpu, gpus=gpus)) for gpus in (1, 2)
    )
    assert (
        two_gpus["forward"] == one_gpu["forward"] / 2
        and two_gpus["decode"] == one_gpu["decode"] / 2
    )
    assert one_gpu["prefill"] == step(SMALL, rates(flop=1.0))["prefill"] / 2
    assert one_gpu["backward"] == 3 * one_gpu["forward"] - 4 * 2 * 25 * HEAD
    engine = step(SMALL, rates(flop=1.0), replace(on_gpu, gpus=2, tensor_parallel=2))
    assert engine["decode"] == one_gpu["decode"] / 2
    full, tight = (
        step(SMALL, rates(memory=1.0), on_gpu, kv_tokens=room)["decode"]
        for room in (math.inf, 41.0)
    )
    weights = 2 * (WEIGHTS + HEAD)
    assert tight - full == pytest.approx(24 * weights), (
        "two at a time read the weights twice as often"
    )


def test_decode_steps_and_the_longest_response_by_hand() -> None:
    work = replace(WORK, rates=None, response_length=(25, 35))
    of = rates(memory=1.0, link=1.0)
    costs = step(MOE, of, work, "w4a16")
    assert (
        costs["small_kernels"] == pytest.approx(24 * 2 * 18 * 3e-6)
        and costs["all_reduce"] == costs["engine"] == 0
    )
    assert costs["sampler"] == 24 * (125e-6 + 8 * 4 * 4 * 100)
    assert step(SMALL, of, work, "w8a8")["small_kernels"] == pytest.approx(24 * 2 * 18 * 3e-6), (
        "not compiled"
    )
    two = step(MOE, of, replace(work, gpus=2, tensor_parallel=2), "w4a16")
    assert two["all_reduce"] == pytest.approx(24 * 2 * 2 * (12e-6 + 2 * 2 * 4 * 64))
    wire = step(MOE, of, work, "w4a16")["published"] - 2 * (
        MOE.parameters - MOE.matrix_parameters + 2 * 4 * 64
    )
    active = wire * (1 - 0.5 * 2 * 4 * 6144 / (2 * (4 * 6144 + 12288)))
    alone = active + 2 * HEAD + 2 * 18 * 3e-6 + 125e-6 + 8 * 4 * 100
    assert costs["tail"] == pytest.approx(10 * alone, rel=1e-3), (
        "one token reads two of four experts"
    )
    fast = step(MOE, rates(), work, "w4a16")
    assert fast["tail"] == pytest.approx(10 * 8e-3), "the host takes longer"
    assert fast["engine"] == pytest.approx(24 * 8e-3 - fast["small_kernels"] - fast["sampler"])


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
    assert measured.product["bf16"] == [Measured(1.0, 200.0), Measured(100.0, 2000.0)]
    assert measured.product["w8a8"] == [Measured(1.0, 400.0)]
    assert [measured.flop_per_s("bf16", rows) for rows in (1, 9, 11, 10**6)] == [
        200,
        200,
        2000,
        2000,
    ]
    assert measured.product["fp8"] == measured.product["bf16"] and measured.memory == 5.0
    said = dict.fromkeys(measured.sources)
    assert any("fp8" in line and "assumed" in line for line in said) and not any(
        "assumed" in line for line in said if line.startswith(("bf16", "w8a8", "memory"))
    )
    path.write_text(
        json.dumps({"device": "d", "ceilings": {"copy_bytes_per_s": 5.0}, "results": entries[2:]})
    )
    with pytest.raises(UserError, match="BF16"):
        measured_rates(path)


def test_the_stated_error_is_that_of_the_committed_measurements() -> None:
    document = json.loads((RESULTS / "steps_cpu.json").read_text())
    workload, of = document["workload"], measured_rates(RESULTS / "kernels_cpu.json")
    keys = ("prompts", "n", "prompt_length", "mini_batches")
    work = Work(**{key: workload[key] for key in keys}, response_length=(workload["response_length"],), gpus=1,
                micro_batch=workload["micro_batch_size"], rates=Path("kernels_cpu.json"))  # fmt: skip
    size = ModelSize.from_config(document["model"])
    quotients: dict[str, list[float]] = {phase: [] for phase in ERROR}
    for result in document["results"]:
        scheme = get_scheme(result["scheme"], workload["group_size"])
        low_bit = scheme.quantized and result["level"] != "off"
        seconds = Roofline(size, of, work, scheme, math.inf, low_bit=low_bit).step().seconds
        predicted = seconds | {
            "step": sum(seconds.values()),
            "rollout": seconds["prefill"] + seconds["decode"],
            "update": seconds["forward"] + seconds["backward"] + seconds["optimizer"],
        }
        for phase, quotient in quotients.items():
            quotient.append(
                predicted[phase] / summary(result["phases"][phase]["samples"])["median"]
            )
    assert {phase: (round(min(q), 2), round(max(q), 2)) for phase, q in quotients.items()} == ERROR
    assert len(document["results"]) == 11


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
