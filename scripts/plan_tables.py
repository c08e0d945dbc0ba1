"""Write the predicted tables of docs/lookup/results/benchmarks.md and docs/do/lora.md.

`python scripts/plan_tables.py docs/do/lora.md` writes those of one page. A table
stands between `<!-- plan: NAME -->` and `<!-- /plan -->`.

    sizes    a step by scheme, level and size of the model relative to BF16 at `off`, with an H200's measured rates
    exact    the same at `model` for the kernels that leave only the last bit of δ, with and without the pass
    speed    time of a step by model, scheme and level relative to BF16, beside arXiv 2604.07853 (figures 9b and 11)
    phases   Qwen3-30B-A3B with long responses, by phase
    fits     with adapters, the longest responses that one GPU has room for
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bench_table import ROOT, main

from qarl.bench.model import default_group_size, find_model, run_config
from qarl.bench.plan.devices import assumed_rates, measured_rates
from qarl.bench.plan.multiplier import Multiplier
from qarl.bench.plan.predict import memory, predict
from qarl.bench.plan.roofline import PHASES, TERMS, Roofline, Setup
from qarl.bench.plan.work import Work
from qarl.bench.report import markdown_table
from qarl.checks.memory import estimate
from qarl.checks.memory_parts import GIB
from qarl.config.level import Level
from qarl.doctor.model import TIGHT
from qarl.kernels.cuda.vllm_linears import VllmMarlinLinear
from qarl.kernels.speed import RESULTS
from qarl.schemes import engine_scheme_names, get_scheme
from qarl.schemes.kernel_choice import KernelChoice

RATES = ROOT / "benchmarks" / "results" / RESULTS
STEP: dict[str, Any] = {
    "gpus": 1, "prompts": 64, "n": 8, "prompt_length": 512, "response_length": (1024, 2048), "mini_batches": 1,
    "micro_tokens": 16384, "optimizer": "adamw", "constant": 0, "rates": RATES,
}  # fmt: skip
SIZES = {
    "Qwen2.5-0.5B": "0.5B",
    "Qwen2.5-Math-1.5B": "1.5B",
    "Qwen3-8B": "8B",
    "Qwen3-30B-A3B": "30B-A3B",
}
GPU = "h100"
LOW_BIT = engine_scheme_names(quantized=True)
SPEED: dict[str, Any] = {
    "levels": (Level.OFF, Level.LINEARS),
    "gpu": GPU, "gpus": 8, "prompts": 512, "n": 8, "prompt_length": 512, "response_length": (2048,), "mini_batches": 8,
    "micro_batch": 8, "optimizer": "muon",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-Math-7B": {},
    "Qwen3-8B": {},
    # W8A8 needs QaRL's own kernel, whose speed for experts nobody has measured.
    # With two GPUs an engine's BF16 weights would leave hardly any room for a KV cache.
    "Qwen3-30B-A3B": {
        "tensor_parallel": 4,
        "gpu_memory_utilization": 0.5,
        "schemes": ("w4a16", "fp8"),
    },
}
PAPER = {("Qwen3-30B-A3B", "w4a16"): ("1.4", "1.3")}
"""What the paper's text says of rollouts alone and of QaRL. Its figures have no numbers."""
LONG: dict[str, Any] = {
    "model": "Qwen3-30B-A3B", "gpu": GPU, "gpus": 8, "tensor_parallel": 2, "gpu_memory_utilization": 0.4,
    "prompts": 512, "n": 8, "prompt_length": 200, "response_length": (4000, 16384), "mini_batches": 8,
    "micro_tokens": 22528, "schemes": ("w4a16",), "levels": (Level.LINEARS,),
    "optimizer": "muon",
}  # fmt: skip

ROOM = {16: 15.6, 24: 22.1, 48: 44.4, 80: 79.2}
"""GB that a GPU is sold with -> GiB that its driver reports: RTX 4080, A10, A40 and A100."""
ADAPTED = ("Qwen2.5-0.5B", "Qwen2.5-Math-1.5B", "Qwen3-8B", "Qwen3-30B-A3B")
SEQUENCES, PROMPT = 16, 1024
"""Responses of full length that the KV cache must have room for at a time, and tokens of their prompts."""
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def sizes() -> str:
    """Return a row for each scheme and level and a column for each model. At `model` also without the pass for old
    log-probs."""
    rates = measured_rates(RATES)
    rows: dict[tuple[str, Level], list[str]] = {}
    kernels: dict[tuple[str, Level], str] = {}
    for model in SIZES:
        works = [Work(model=model, old_log_probs=mode, **STEP) for mode in ("recompute", "rollout")]
        steps, without = (predict(work, rates) for work in works)
        base = steps[0]["step"]
        for row, other in zip(steps, without, strict=True):
            key = row["scheme"], row["level"]
            cell = f"{base / row['step']:.2f}"
            if row["level"].follows_engine:
                cell += f" ({base / other['step']:.2f})"
            if find_model(model).size.experts and refuses_experts(row["scheme"]):
                cell = "refused"
            rows.setdefault(key, []).append(cell)
            kernels[key] = " / ".join(row["multiplies"].values())
        rows[steps[0]["scheme"], steps[0]["level"]][-1] += f" = {base:.0f} s"
    heads = ["scheme", "level", *SIZES.values(), "products by: engine / trainer"]
    lines = [
        [scheme, f"`{level}`", *cells, kernels[scheme, level]]
        for (scheme, level), cells in rows.items()
    ]
    return markdown_table(heads, lines)


def refuses_experts(scheme: str) -> bool:
    """Return whether vLLM's own kernels cannot run experts of this scheme on a GPU."""
    return get_scheme(scheme).gpu_experts_refusal("", KernelChoice.ENGINE) is not None


class Exact(NamedTuple):
    """Kernels at which no row depends on the others, by the names of those that were measured. `bounds`: how many times
    as fast as BF16 a step without the pass should at least be, by model."""

    label: str
    scheme: str
    engine: str
    trainer: str
    bounds: Mapping[str, float]


W4A16_BOUNDS = {"Qwen3-8B": 1.10, "Qwen3-30B-A3B": 1.55}
EXACT = (
    Exact("Machete without splits on both sides", "w4a16", "vllm_machete", "vllm_machete", W4A16_BOUNDS),
    Exact("the same, the trainer by cuBLAS on a BF16 copy", "w4a16", "vllm_machete", "bf16", W4A16_BOUNDS),
    Exact("CUTLASS", "w8a8", "vllm_cutlass_int8", "vllm_cutlass_int8", {"Qwen3-8B": 1.25}),
    Exact("CUTLASS, more than 64 rows a call", "fp8", "vllm_cutlass_fp8", "vllm_cutlass_fp8", {"Qwen3-8B": 1.25}),
)  # fmt: skip
"""dX is everywhere a BF16 product with dequantized weights."""


def exact_ratios(kernels: Exact, model: str) -> tuple[float, float]:
    """Return BF16's seconds of a step at `off` over those of `kernels` at `model`, without the pass for old log-probs
    and with it."""
    rates = measured_rates(RATES)
    work = Work(
        model=model, schemes=("bf16",), levels=(Level.OFF,), old_log_probs="recompute", **STEP
    )
    (base,) = predict(work, rates)
    source = find_model(model)
    scheme = get_scheme(kernels.scheme, default_group_size(source.size))
    held = memory(work, rates, source.size, scheme.name, Level.MODEL)
    points = {**rates.product["bf16"], **rates.product[kernels.scheme]}
    engine, trainer = (
        Multiplier(scheme, name, points[name]) for name in (kernels.engine, kernels.trainer)
    )
    seconds = []
    for recomputed in (0.0, 1.0):
        run = held.decides(Setup(engine, trainer, compiled=False, recomputed=recomputed))
        step = Roofline(source.size, rates, work, run, held.kv_tokens).step()
        seconds.append(sum(step.seconds.values()))
    return base["step"] / seconds[0], base["step"] / seconds[1]


def exact() -> str:
    """Return a row for each scheme and its kernels, and a column for each model that has bounds."""
    lines = []
    for kernels in EXACT:
        cells = []
        for model in W4A16_BOUNDS:
            without, with_pass = exact_ratios(kernels, model)
            bound = kernels.bounds.get(model)
            verdict = (
                "" if bound is None else f", {'met' if without >= bound else 'missed'}: {bound:.2f}"
            )
            known = not (find_model(model).size.experts and refuses_experts(kernels.scheme))
            cells.append(f"{without:.3f} ({with_pass:.2f}){verdict}" if known else "refused")
        lines.append([kernels.scheme, kernels.label, *cells])
    return markdown_table(["scheme", "kernels", *(SIZES[model] for model in W4A16_BOUNDS)], lines)


def speed() -> str:
    """Return the rows of figures 9b and 11: for each model and scheme, rollouts alone and QaRL, relative to BF16."""
    heads = [
        "model",
        "scheme",
        "BF16, s",
        "rollouts alone, s",
        "x BF16",
        "paper",
        "QaRL at `linears`, s",
        "x BF16",
    ]
    lines: list[list[str]] = []
    for name, changes in MODELS.items():
        settings = {"model": name, "schemes": LOW_BIT, **SPEED, **changes}
        (base,) = predict(
            Work(**settings | {"schemes": ("bf16",), "levels": (Level.OFF,)}), assumed_rates(GPU)
        )
        rows = predict(Work(**settings), assumed_rates(GPU))
        for off, linears in zip(rows[::2], rows[1::2], strict=True):
            paper = PAPER.get((name, off["scheme"]), ("", ""))
            cells = [name, off["scheme"], f"{base['step']:.0f}"]
            for row, of_paper in ((off, paper[0]), (linears, paper[1])):
                cells += [f"{row['step']:.0f}", f"{base['step'] / row['step']:.2f}", of_paper]
            gain = round(base["step"] / linears["step"], 2)
            lines.append([*cells, "loses" if gain < 1 else "gains" if gain > 1 else "neither"])
    return markdown_table([*heads, "paper", "QaRL"], lines)


def phases() -> str:
    """Return the seconds of each phase of a step with long responses, and its largest terms."""
    (linears,) = predict(Work(**LONG), assumed_rates(GPU))
    lines = [
        [phase, _seconds(linears["phases"][phase]), _largest(linears, phase)] for phase in PHASES
    ]
    lines.append(["step", _seconds(linears["step"]), ""])
    return markdown_table(["phase", "predicted, s", "largest terms, s"], lines)


def _largest(row: dict[str, Any], phase: str) -> str:
    terms = [
        (seconds, name)
        for name, seconds in row["seconds"].items()
        if TERMS[name].phase == phase and seconds
    ]
    return ", ".join(
        f"{name} {_seconds(seconds)}" for seconds, name in sorted(terms, reverse=True)[:5]
    )


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def fits() -> str:
    """Return the longest responses, in tokens, with which a local run of `lora.r=32` fits one GPU, by model and GPU."""
    heads = ["longest responses, W4A16, `lora.r=32`", *(f"{gigabytes} GB" for gigabytes in ROOM)]
    return markdown_table(
        heads, [[name, *(_longest(name, room) for room in ROOM.values())] for name in ADAPTED]
    )


def _longest(name: str, room: float) -> str:
    source = find_model(name)
    positions = source.config["max_position_embeddings"]
    kernels = dict.fromkeys(
        source.size.linears().values(), VllmMarlinLinear
    )  # stores its own copy of the weights
    for tokens in (2**power for power in range(15, 8, -1) if PROMPT + 2**power <= positions):
        work = Work(model=name, prompts=64, n=8, prompt_length=PROMPT)
        sizes = {f"{part}_micro_batch_size_per_gpu": 1 for part in ("ppo", "log_prob")}
        more: dict[str, Any] = {
            "data": {"max_response_length": tokens},
            "lora": {"r": 32},
            "actor": sizes,
        }
        config = run_config(
            name, work, "w4a16", "linears", model={"gradient_checkpointing": True}, **more
        )
        for share in SHARES:
            rollout = config.rollout.model_copy(update={"gpu_memory_utilization": share})
            run = config.model_copy(update={"rollout": rollout})
            plan = estimate(
                source.size, run, device="cuda", gpu_memory_bytes=int(room * GIB), kernels=kernels
            )
            if plan.total("update") > TIGHT * room * GIB:  # whatever vLLM's share
                break
            if plan.peak[1] <= TIGHT * room * GIB and plan.kv_tokens >= SEQUENCES * (
                PROMPT + tokens
            ):
                return f"{tokens} ({share:.0%})"
    return "none"


TABLES = {"sizes": sizes, "exact": exact, "speed": speed, "phases": phases, "fits": fits}


def table(name: str) -> str:
    return f"{TABLES[name]()}\n"


if __name__ == "__main__":
    main("plan", table, __doc__)
