"""`qarl.bench plan`: the roofline against numbers worked by hand, and its stated error against committed steps."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from qarl.bench.plan.devices import Rates, assumed_rates, measured_rates
from qarl.bench.plan.multiplier import Measured
from qarl.bench.plan.predict import ERROR, notes, predict, setup
from qarl.bench.plan.roofline import TERMS, Roofline
from qarl.bench.plan.work import Work
from qarl.bench.report import summary
from qarl.checks.model_size import ModelSize
from qarl.config.level import Level
from qarl.config.optimizers import Optimizer, register, unregister
from qarl.errors import UserError
from qarl.schemes import engine_scheme_names, get_scheme
from qarl.schemes.kernel_choice import KernelChoice

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


def rates(flop: float = math.inf, memory: float = math.inf, **changes: Any) -> Rates:
    product = {name: {"any": (Measured(1.0, flop),)} for name in engine_scheme_names()}
    return Rates("one", product, memory, (), **changes)


def step(size: ModelSize, of: Rates, work: Work = WORK, scheme: str = "bf16", level: str = "linears",
         kv_tokens: float = math.inf, *, exact: bool = False, **decided: Any) -> dict[str, float]:  # fmt: skip
    of_weights = get_scheme(scheme, 32)
    of_run = setup(work, of, of_weights, Level(level), KernelChoice.ENGINE, exact=exact)
    step = Roofline(size, of, work, replace(of_run, **decided), kv_tokens).step()
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
    work = replace(WORK, gpus=2)
    costs = step(SMALL, rates(on_gpu=True, link=10.0), work)
    passes = 3 * PARAMETERS + 2 * PARAMETERS
    assert costs["gathered"] == passes + PARAMETERS, "and the publish gathers once more"
    assert costs["communication"] == passes / 10 and costs["publish"] == PARAMETERS / 10
    hidden = step(SMALL, rates(on_gpu=True, flop=1e3, link=10.0), work)
    beside = 2 * hidden["forward"] + hidden["backward"]
    assert hidden["communication"] == pytest.approx(max(passes / 10 - beside, 0))
    wire = step(SMALL, rates(on_gpu=True), work, "w4a16")["published"]
    for level, weights in (("linears", wire), ("off", 2 * PARAMETERS)):
        low_bit = step(SMALL, rates(on_gpu=True), work, "w4a16", level)
        assert low_bit["gathered"] == (3 * weights + 4 * PARAMETERS + wire) / 2, (
            "the publish gathers low bits"
        )
    far = step(
        SMALL, rates(on_gpu=True, link=10.0, network=1.0), replace(work, gpus=16, prompts=16)
    )
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
    one_gpu, two_gpus = (
        step(SMALL, rates(flop=1.0, on_gpu=True), replace(WORK, gpus=gpus)) for gpus in (1, 2)
    )
    assert (
        two_gpus["forward"] == one_gpu["forward"] / 2
        and two_gpus["decode"] == one_gpu["decode"] / 2
    )
    assert one_gpu["prefill"] == step(SMALL, rates(flop=1.0))["prefill"] / 2
    assert one_gpu["backward"] == 2 * one_gpu["forward"]
    engine = step(SMALL, rates(flop=1.0, on_gpu=True), replace(WORK, gpus=2, tensor_parallel=2))
    assert engine["decode"] == one_gpu["decode"] / 2
    full, tight = (
        step(SMALL, rates(memory=1.0, on_gpu=True), WORK, kv_tokens=room)["decode"]
        for room in (math.inf, 41.0)
    )
    weights = 2 * (WEIGHTS + HEAD)
    assert tight - full == pytest.approx(24 * weights), (
        "two at a time read the weights twice as often"
    )
    limited = step(SMALL, rates(memory=1.0, on_gpu=True), sequences=2)["decode"]
    assert limited == pytest.approx(tight), "two at a time by max_num_seqs"


def test_a_backward_that_recomputes_activations_by_hand() -> None:
    """It runs the layers' forward again, without lm_head, and moves the forward's other bytes again."""
    of_products = [
        step(SMALL, rates(flop=1.0, on_gpu=True), checkpointed=checkpointed)
        for checkpointed in (False, True)
    ]
    blocks = of_products[0]["forward"] - 4 * 2 * 25 * HEAD
    assert of_products[1]["backward"] - of_products[0]["backward"] == blocks
    of_bytes = [
        step(SMALL, rates(memory=1.0, on_gpu=True), checkpointed=checkpointed)
        for checkpointed in (False, True)
    ]
    logits = 24 * 4 * 25 * 100
    again = of_bytes[0]["old_log_prob_elementwise"] - logits
    moved = [costs["update_elementwise"] for costs in of_bytes]
    assert moved[1] - moved[0] == pytest.approx(again)


@pytest.mark.parametrize(
    ("model", "checkpointed", "sequences"),
    [("Qwen2.5-0.5B", False, 512), ("Qwen3-8B", True, 256)],
)
def test_the_memory_decides_as_in_a_run(model: str, checkpointed: bool, sequences: int) -> None:
    """512 prompts and answers of up to 2,048 tokens on an H200: half a billion parameters leave room for activations,
    8 billion with their optimizer do not."""
    work = Work(model=model, gpus=1, gpu="h200", prompts=64, response_length=(1024, 2048),
                prompt_length=512, mini_batches=1, micro_tokens=16384, schemes=("bf16",))  # fmt: skip
    (row, *_) = predict(work, assumed_rates("h200"))
    assert (row["checkpointed"], row["sequences"]) == (checkpointed, sequences)
    assert ("activations recomputed" in notes([row | {"level": Level.LINEARS}])) == checkpointed


def test_decode_steps_and_the_longest_response_by_hand() -> None:
    work = replace(WORK, response_length=(25, 35))
    of = rates(memory=1.0, link=1.0, on_gpu=True)
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
    fast = step(MOE, rates(on_gpu=True), work, "w4a16")
    assert fast["tail"] == pytest.approx(10 * 8e-3), "the host takes longer"
    assert fast["engine"] == pytest.approx(24 * 8e-3 - fast["small_kernels"] - fast["sampler"])


def test_what_the_level_makes_of_the_engine() -> None:
    """vLLM compiles neither 8-bit activations nor an engine that the trainer follows."""
    of = rates(on_gpu=True)
    compiled = {
        (scheme, level): setup(
            WORK, of, get_scheme(scheme), Level(level), KernelChoice.ENGINE, exact=False
        ).compiled
        for scheme in engine_scheme_names()
        for level in ("off", "linears", "model")
    }
    for scheme in engine_scheme_names():
        rounds = get_scheme(scheme).rounds_activations
        assert [compiled[scheme, level] for level in ("off", "linears", "model")] == (
            [False] * 3 if rounds else [True, True, False]
        )


def test_the_pass_for_old_log_probs_by_hand() -> None:
    """Four mini-batches: where δ is exact, `auto` computes an eighth of three quarters of the rows."""
    work = replace(WORK, mini_batches=4)

    def old(mode: str, *, exact: bool, on_gpu: bool = False) -> tuple[float, float]:
        of = rates(flop=1.0, memory=1.0, on_gpu=on_gpu)
        costs = step(SMALL, of, replace(work, old_log_probs=mode), level="model", exact=exact)
        return costs["old_log_prob"] / costs["forward"], costs.get("old_log_prob_elementwise", 0.0)

    for on_gpu in (False, True):
        whole = old("recompute", exact=True, on_gpu=on_gpu)
        assert whole[0] == 1 and (whole[1] > 0) == on_gpu
        assert old("auto", exact=False, on_gpu=on_gpu) == whole
        assert old("rollout", exact=False, on_gpu=on_gpu) == (0, 0)
        share = old("auto", exact=True, on_gpu=on_gpu)
        assert share == (pytest.approx(3 / 32), pytest.approx(3 / 32 * whole[1]))
    gathered = [
        step(SMALL, rates(on_gpu=True), replace(work, gpus=2, old_log_probs=mode))["gathered"]
        for mode in ("recompute", "rollout")
    ]
    assert gathered[0] - gathered[1] == PARAMETERS, "a pass gathers half of the BF16 weights"


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
        work_of_all = replace(work, old_log_probs="recompute")
        of_run = setup(
            work_of_all, of, scheme, Level(result["level"]), KernelChoice.ENGINE, exact=False
        )
        seconds = Roofline(size, of, work, of_run, math.inf).step().seconds
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
