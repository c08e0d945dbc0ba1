"""Write the predicted tables of docs/lookup/results/benchmarks.md and docs/do/lora.md.

`python scripts/plan_tables.py docs/do/lora.md` writes those of one page. A table
stands between `<!-- plan: NAME -->` and `<!-- /plan -->`.

    speed    time of a step by model, scheme and level relative to BF16, beside arXiv 2604.07853 (figures 9b and 11)
    phases   Qwen3-30B-A3B with long responses, by phase
    fits     with adapters, the longest responses that one GPU has room for
"""

from __future__ import annotations

from typing import Any

from bench_table import main

from qarl.bench.model import find_model, run_config
from qarl.bench.plan.devices import assumed_rates
from qarl.bench.plan.predict import predict
from qarl.bench.plan.roofline import PHASES, TERMS
from qarl.bench.plan.work import Work
from qarl.bench.report import markdown_table
from qarl.checks.memory import estimate
from qarl.checks.memory_parts import GIB
from qarl.doctor.model import TIGHT
from qarl.kernels.cuda.vllm_linears import VllmMarlinLinear
from qarl.schemes import engine_scheme_names

GPU = "h100"
LOW_BIT = engine_scheme_names(quantized=True)
SPEED: dict[str, Any] = {
    "gpu": GPU, "gpus": 8, "prompts": 512, "n": 8, "prompt_length": 512, "response_length": (2048,), "mini_batches": 8,
    "micro_batch": 8, "optimizer": "muon",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-Math-7B": {},
    "Qwen3-8B": {},
    # W8A8 is refused: the vLLM of requirements/gpu.lock has no int8 products for experts on GPUs.
    "Qwen3-30B-A3B": {
        "tensor_parallel": 2,
        "gpu_memory_utilization": 0.5,
        "schemes": ("w4a16", "fp8"),
    },
}
BASELINE: dict[str, dict[str, Any]] = {"Qwen3-30B-A3B": {"tensor_parallel": 4}}
"""What BF16 has in addition: with two GPUs an engine's BF16 weights would leave hardly any room for a KV cache."""
PAPER = {("Qwen3-30B-A3B", "w4a16"): ("1.4", "1.3")}
"""What the paper's text says of rollouts alone and of QaRL. Its figures have no numbers."""
LONG: dict[str, Any] = {
    "model": "Qwen3-30B-A3B", "gpu": GPU, "gpus": 8, "tensor_parallel": 2, "gpu_memory_utilization": 0.4,
    "prompts": 512, "n": 8, "prompt_length": 200, "response_length": (4000, 16384), "mini_batches": 8,
    "micro_tokens": 22528, "schemes": ("w4a16",), "optimizer": "muon",
}  # fmt: skip

ROOM = {16: 15.6, 24: 22.1, 48: 44.4, 80: 79.2}
"""GB that a GPU is sold with -> GiB that its driver reports: RTX 4080, A10, A40 and A100."""
ADAPTED = ("Qwen2.5-0.5B", "Qwen2.5-Math-1.5B", "Qwen3-8B", "Qwen3-30B-A3B")
SEQUENCES, PROMPT = 16, 1024
"""Responses of full length that the KV cache must have room for at a time, and tokens of their prompts."""
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


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
            Work(**settings | BASELINE.get(name, {}) | {"schemes": ("bf16",)}), assumed_rates(GPU)
        )
        rows = predict(Work(**settings), assumed_rates(GPU))
        for off, linears in zip(rows[::2], rows[1::2], strict=True):
            paper = PAPER.get((name, off["scheme"]), ("", ""))
            cells = [name, off["scheme"], f"{base['step']:.0f}"]
            for row, said in ((off, paper[0]), (linears, paper[1])):
                cells += [f"{row['step']:.0f}", f"{base['step'] / row['step']:.2f}", said]
            gain = round(base["step"] / linears["step"], 2)
            lines.append([*cells, "loses" if gain < 1 else "gains" if gain > 1 else "neither"])
    return markdown_table([*heads, "paper", "QaRL"], lines)


def phases() -> str:
    """Return the seconds of each phase of a step with long responses, and its largest terms."""
    _, linears = predict(Work(**LONG), assumed_rates(GPU))
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


TABLES = {"speed": speed, "phases": phases, "fits": fits}


def table(name: str) -> str:
    return f"{TABLES[name]()}\n"


if __name__ == "__main__":
    main("plan", table, __doc__)
