"""`python -m qarl.bench plan`: predict the time of a training step from floating-point operations and bytes.

    python -m qarl.bench plan model=Qwen3-8B gpu=h100 gpus=16
    python -m qarl.bench plan model=SmolLM2-135M rates=KERNELS.json prompts=8 n=4 prompt_length=8 response_length=16

Each low-bit scheme has a row for level `off` (quantized rollouts with a BF16 trainer) and one for level `linears`. The
keys are those of `qarl.bench.roofline.Work`. A second table has each term of the prediction.
"""

from __future__ import annotations

import json
from typing import Any

from qarl.bench import roofline
from qarl.bench.arguments import check_divides
from qarl.bench.model import default_group_size, find_model, run_config
from qarl.bench.report import markdown_table
from qarl.bench.roofline import TERMS, Rates, Work, by_phase
from qarl.checks.memory import MemoryEstimate, estimate
from qarl.checks.model_size import ModelSize
from qarl.errors import UserError

KEYS = Work
ERROR = {
    "rollout": (0.18, 0.53),
    "old_log_prob": (0.54, 0.80),
    "update": (0.51, 0.71),
    "step": (0.33, 0.62),
}
"""Minimum and maximum of predicted / measured seconds, for `benchmarks/results/steps_cpu.json` (SmolLM2-135M, 11 pairs
of scheme and level) at the rates in `kernels_cpu.json`."""


def run(work: Work) -> int:
    """Predict, print, write, and return the exit code."""
    rates = roofline.measured_rates(work.rates) if work.rates else roofline.assumed_rates(work.gpu)
    rows = predict(work, rates)
    mean = work.response_length[0]
    longest = work.response_length[-1]
    what = f"{find_model(work.model).name} on {work.gpus} x {rates.device}, {work.prompts} x {work.n} responses of"
    what += f" {mean} tokens (at most {longest}) to prompts of {work.prompt_length}. Rates of one device:"
    print("\n  ".join([what, *rates.said]), table(rows), terms_table(rows), footer(), sep="\n\n")
    if work.json:
        work.json.write_text(
            json.dumps({"rates": rates.said, "results": rows}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


def predict(work: Work, rates: Rates) -> list[dict[str, Any]]:
    """Return a row for each scheme and level. Raise UserError if numbers do not divide evenly or no sequence fits."""
    check_divides(work, "tensor_parallel", "gpus")
    check_divides(work, "mini_batches", "prompts")
    source = find_model(work.model)
    size = source.size
    group_size = default_group_size(source.size)
    levels = (
        ("linears",) if work.lora_r else ("off", "linears")
    )  # adapters have no BF16 base for level `off`
    cases = [(s, level) for s in work.schemes for level in (("off",) if s == "bf16" else levels)]
    rows = []
    for scheme, level in cases:
        plan = memory(work, rates, size, scheme, level)
        room = float(plan.kv_tokens) if rates.memory_bytes else float("inf")
        if room < work.prompt_length + work.response_length[-1]:
            raise UserError(f"an engine with {scheme} weights has room for {room:.0f} tokens, too few for a sequence",
                            where="tensor_parallel, gpu_memory_utilization", fix="raise one of these keys")  # fmt: skip
        seconds, gathered, published = roofline.Roofline(
            size, rates, work, scheme, level, group_size, room
        ).step()
        rows.append({"scheme": scheme, "level": level, "seconds": seconds, "phases": by_phase(seconds),
                     "step": sum(seconds.values()),
                     "gathered_bytes": gathered, "published_bytes": published,
                     "memory_bytes": plan.peak[1], "memory_phase": plan.peak[0],
                     "too_much": 0 < rates.memory_bytes < plan.peak[1]})  # fmt: skip
    return rows


def memory(work: Work, rates: Rates, size: ModelSize, scheme: str, level: str) -> MemoryEstimate:
    """Return the doctor's memory estimate: for one GPU, or on a CPU for the process."""
    on_gpu = bool(rates.memory_bytes)
    nodes = -(-work.gpus // roofline.GPUS_PER_NODE)
    micro: dict[str, Any] = {
        f"{name}_micro_batch_size_per_gpu": work.micro_batch for name in ("ppo", "log_prob")
    }
    if work.micro_tokens is not None:
        micro = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": work.micro_tokens}
    config = run_config(
        *(work.model, work, scheme, level),
        backend="verl" if on_gpu else "local",
        model={"gradient_checkpointing": on_gpu},
        data={"max_response_length": work.response_length[-1]},
        rollout={"tensor_model_parallel_size": work.tensor_parallel},
        optim={"name": work.optimizer},
        lora={"r": work.lora_r},
        actor=micro,
        trainer={"nnodes": nodes, "n_gpus_per_node": work.gpus // nodes},
    )
    return estimate(
        size, config, device="cuda" if on_gpu else "cpu", gpu_memory_bytes=rates.memory_bytes
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: seconds of each phase, bytes, and memory of one GPU."""
    phases = rows[0]["phases"]
    heads = [
        "scheme",
        "level",
        *phases,
        "step, s",
        "x bf16",
        "gathered, GB",
        "published, GB",
        "memory, GiB (phase)",
    ]
    base = rows[0]["step"] if rows[0]["scheme"] == "bf16" else None
    lines = []
    for row in rows:
        cells = [row["scheme"], row["level"], *(f"{row['phases'][phase]:.3g}" for phase in phases)]
        cells += [f"{row['step']:.4g}", f"{base / row['step']:.2f}" if base else ""]
        cells += [f"{row[key] / 1e9:.4g}" for key in ("gathered_bytes", "published_bytes")]
        why = f"{row['memory_phase']}, too much" if row["too_much"] else row["memory_phase"]
        lines.append([*cells, f"{row['memory_bytes'] / 2**30:.1f} ({why})"])
    return markdown_table(heads, lines)


def terms_table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the seconds of each term, a column for each scheme and level."""
    names = [name for name in TERMS if any(name in row["seconds"] for row in rows)]
    heads = ["term, s", *(f"{row['scheme']} {row['level']}" for row in rows), "phase: what"]
    return markdown_table(heads, [
        [name, *(f"{row['seconds'].get(name, 0.0):.3g}" for row in rows), ": ".join(TERMS[name])] for name in names
    ])  # fmt: skip


def footer() -> str:
    errors = ", ".join(f"{phase} {low:.2f}-{high:.2f}" for phase, (low, high) in ERROR.items())
    return (
        "docs/benchmarks.md says what is left out, and qarl/bench/roofline.py has each assumed or estimated number. No "
        "GPU has been compared.\n"
        f"Error (predicted / measured) on a CPU, 11 steps of 135M parameters; larger for smaller models: {errors}."
    )
