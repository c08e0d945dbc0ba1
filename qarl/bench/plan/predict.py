"""`python -m qarl.bench plan`: predict the time of a training step from floating-point operations and bytes.

    python -m qarl.bench plan model=Qwen3-8B gpu=h100 gpus=16
    python -m qarl.bench plan model=Qwen3-8B gpus=1 rates=benchmarks/results/gpu_check_2026-11-27.json
    python -m qarl.bench plan model=SmolLM2-135M rates=KERNELS.json prompts=8 n=4 prompt_length=8 response_length=16

Each low-bit scheme has a row for level `off` (quantized rollouts with a BF16 trainer), one for level `linears`, and one
for level `model`, with the engine's kernels if their rows do not depend on each other, otherwise with QaRL's
(`quant.kernels=qarl`). The keys are those of `qarl.bench.plan.work.Work`. A second table has each term of the
prediction. A level that the model does not have is predicted, too, and marked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from qarl.align.applied_level import split_unavailable
from qarl.align.cuda import unavailable_on_cuda, unconfirmed_on_cuda
from qarl.bench.arguments import check_divides
from qarl.bench.model import Source, default_group_size, find_model, run_config
from qarl.bench.plan.assumptions import GPUS_PER_NODE
from qarl.bench.plan.devices import Rates, assumed_rates, measured_rates
from qarl.bench.plan.multiplier import invariant_choice, multiplier
from qarl.bench.plan.roofline import TERMS, Roofline, Setup, by_phase
from qarl.bench.plan.work import Work
from qarl.bench.report import markdown_table
from qarl.checks.gpu_memory_decides import DEFAULT_SEQUENCES, sequences_for
from qarl.checks.memory import MemoryEstimate, estimate, recomputes
from qarl.checks.model_size import ModelSize
from qarl.config.actor import ActorConfig
from qarl.config.level import Level
from qarl.errors import UserError
from qarl.kernels.registry import presumed_experts_kernel
from qarl.rollout.engine_config import compiles
from qarl.schemes import UNQUANTIZED, Scheme, get_scheme
from qarl.schemes.kernel_choice import KernelChoice
from qarl.step.old_log_probs import expected_share

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
    rates = measured_rates(work.rates, work.gpu) if work.rates else assumed_rates(work.gpu)
    rows = predict(work, rates)
    mean = work.response_length[0]
    longest = work.response_length[-1]
    what = f"{find_model(work.model).name} on {work.gpus} x {rates.device}, {work.prompts} x {work.n} responses of"
    what += f" {mean} tokens (at most {longest}) to prompts of {work.prompt_length}. Rates of one device:"
    heading = "\n  ".join([what, *rates.sources])
    print(heading, table(rows), notes(rows), terms_table(rows), footer(), sep="\n\n")
    if work.json:
        document = {"rates": rates.sources, "results": rows}
        work.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def predict(work: Work, rates: Rates) -> list[dict[str, Any]]:
    """Return a row for each scheme and level. Raise UserError if numbers do not divide evenly or no sequence fits."""
    check_divides(work, "tensor_parallel", "gpus")
    check_divides(work, "mini_batches", "prompts")
    source = find_model(work.model)
    group_size = default_group_size(source.size)
    rows = []
    for name in work.schemes:
        scheme = get_scheme(name, group_size)
        for level in _levels(work, scheme):
            rows.append(_row(work, rates, source, scheme, level))
    return rows


def _levels(work: Work, scheme: Scheme) -> list[Level]:
    """Return the levels that are compared. Without quantization `linears` is `off`. Adapters have no BF16 base for
    level `off`."""
    levels = [level for level in work.levels if scheme.quantized or level is not Level.LINEARS]
    if work.lora_r:
        levels = [level for level in levels if level.low_bit and scheme.quantized] or [Level.OFF]
    return levels


def setup(
    work: Work, rates: Rates, scheme: Scheme, level: Level, choice: KernelChoice, *, exact: bool
) -> Setup:
    """Return what a scheme, a level and a value of quant.kernels make of a run. `exact`: whether δ is within the last
    bits of a log-softmax."""
    trained = scheme if level.low_bit else UNQUANTIZED
    share = expected_share(
        work.old_log_probs,
        exact=exact,
        sample=ActorConfig.model_fields["old_log_probs_sample"].default,
        mini_batches=work.mini_batches,
    )
    return Setup(
        engine=multiplier(rates.product, scheme, choice),
        trainer=multiplier(rates.product, trained, choice),
        compiled=compiles(scheme, aligned=level.follows_engine, kernels=choice),
        recomputed=share,
    )


def _choice(scheme: Scheme, level: Level, rates: Rates) -> KernelChoice:
    """Return the value of quant.kernels of a row: at `model` on a GPU, one whose rows do not depend on each other."""
    exact = invariant_choice(scheme) if level.follows_engine and rates.on_gpu else None
    return exact or KernelChoice.ENGINE


def doubts(work: Work, source: Source, scheme: Scheme, level: Level) -> list[str]:
    """Return why this model does not have `level` on a GPU of capability 9.0, or why δ is not known to be the last bit
    there, each a sentence."""
    if not level.follows_engine:
        return []
    config = SimpleNamespace(**source.config)
    choice = invariant_choice(scheme) or KernelChoice.ENGINE
    experts = presumed_experts_kernel(scheme.operands, choice, "cuda")
    kernels = [] if experts is None else [experts]
    why_not = split_unavailable(work.tensor_parallel) or unavailable_on_cuda(
        config, (9, 0), kernels
    )
    found = [f"not available: {why_not}"] if why_not else []
    if invariant_choice(scheme) is None:
        found.append("rows of its products may depend on each other")
    if unconfirmed := unconfirmed_on_cuda(config, eager=False):
        found.append(unconfirmed)
    return found


def _row(work: Work, rates: Rates, source: Source, scheme: Scheme, level: Level) -> dict[str, Any]:
    """Return the prediction for one scheme and level."""
    size = source.size
    held = memory(work, rates, size, scheme.name, level)
    room = held.kv_tokens
    if room < work.prompt_length + work.response_length[-1]:
        what = f"an engine with {scheme.name} weights has room for {room:.0f} tokens"
        raise UserError(
            f"{what}, too few for a sequence",
            where="tensor_parallel, gpu_memory_utilization",
            fix="raise one of these keys",
        )
    choice = _choice(scheme, level, rates)
    doubtful = doubts(work, source, scheme, level) if rates.on_gpu else []
    exact = level.follows_engine and not doubtful
    of_run = held.decides(setup(work, rates, scheme, level, choice, exact=exact))
    step = Roofline(size, rates, work, of_run, room).step()
    phase, peak = held.estimate.peak
    return {
        "scheme": scheme.name,
        "level": level,
        "kernels": choice,
        "multiplies": {"engine": of_run.engine.kernel, "trainer": of_run.trainer.kernel},
        "recomputed": of_run.recomputed,
        "checkpointed": of_run.checkpointed,
        "sequences": of_run.sequences,
        "doubts": doubtful,
        "seconds": step.seconds,
        "phases": by_phase(step.seconds),
        "step": sum(step.seconds.values()),
        "gathered_bytes": step.gathered,
        "published_bytes": step.published,
        "memory_bytes": peak,
        "memory_phase": phase,
        "too_much": 0 < rates.memory_bytes < peak,
    }


@dataclass(frozen=True)
class Held:
    """A device's memory estimate, and the settings that follow from it where the config has null."""

    estimate: MemoryEstimate
    kv_tokens: float
    checkpointed: bool
    sequences: int

    def decides(self, run: Setup) -> Setup:
        """Return `run` with the memory's decisions."""
        return replace(run, checkpointed=self.checkpointed, sequences=self.sequences)


def memory(work: Work, rates: Rates, size: ModelSize, scheme: str, level: Level) -> Held:
    """Return the doctor's memory estimate, for one GPU, or on a CPU for the process, and what it decides."""
    on_gpu = bool(rates.memory_bytes)
    nodes = -(-work.gpus // GPUS_PER_NODE)
    micro: dict[str, Any] = {
        f"{name}_micro_batch_size_per_gpu": work.micro_batch for name in ("ppo", "log_prob")
    }
    if work.micro_tokens is not None:
        micro = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": work.micro_tokens}
    config = run_config(
        *(work.model, work, scheme, level),
        backend="verl" if on_gpu else "local",
        data={"max_response_length": work.response_length[-1]},
        rollout={"tensor_model_parallel_size": work.tensor_parallel},
        optim={"name": work.optimizer},
        lora={"r": work.lora_r},
        actor=micro,
        trainer={"nnodes": nodes, "n_gpus_per_node": work.gpus // nodes},
    )
    device = "cuda" if on_gpu else "cpu"
    plan = estimate(size, config, device=device, gpu_memory_bytes=rates.memory_bytes)
    if not on_gpu:
        return Held(plan, float("inf"), checkpointed=False, sequences=DEFAULT_SEQUENCES)
    kv_tokens = float(plan.kv_tokens)
    return Held(
        plan,
        kv_tokens,
        checkpointed=recomputes(size, config, device, rates.memory_bytes),
        sequences=sequences_for(size, config, kv_tokens),
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
    first = rows[0]
    unquantized = not get_scheme(first["scheme"]).quantized
    base = first["step"] if unquantized else None
    lines = []
    for row in rows:
        cells = [row["scheme"], row["level"], *(f"{row['phases'][phase]:.3g}" for phase in phases)]
        cells += [f"{row['step']:.4g}", f"{base / row['step']:.2f}" if base else ""]
        cells += [f"{row[key] / 1e9:.4g}" for key in ("gathered_bytes", "published_bytes")]
        why = f"{row['memory_phase']}, too much" if row["too_much"] else row["memory_phase"]
        lines.append([*cells, f"{row['memory_bytes'] / 2**30:.1f} ({why})"])
    return markdown_table(heads, lines)


def notes(rows: list[dict[str, Any]]) -> str:
    """Return a line for the trainer of each row that multiplies low bits or follows the engine: with which kernels, of
    how many rows it computes old log-probs, and what is doubtful."""
    lines = []
    for row in rows:
        by = row["multiplies"]
        who = f"{by['engine']} in the engine, {by['trainer']} in the trainer"
        share = f"old log-probs of {row['recomputed']:.0%} of the rows"
        line = f"{row['scheme']} {row['level']}: quant.kernels={row['kernels']}, {who}; {share}"
        line += f"; up to {row['sequences']} sequences at once"
        if row["checkpointed"]:
            line += "; activations recomputed"
        if row["level"].low_bit:
            lines.append("; ".join([line, *row["doubts"]]))
    return "\n".join(lines)


def terms_table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the seconds of each term, a column for each scheme and level."""
    names = [name for name in TERMS if any(name in row["seconds"] for row in rows)]
    heads = ["term, s", *(f"{row['scheme']} {row['level']}" for row in rows), "phase: what"]
    lines = []
    for name in names:
        term = TERMS[name]
        seconds = [f"{row['seconds'].get(name, 0.0):.3g}" for row in rows]
        lines.append([name, *seconds, f"{term.phase}: {term.what}"])
    return markdown_table(heads, lines)


def footer() -> str:
    errors = ", ".join(f"{phase} {low:.2f}-{high:.2f}" for phase, (low, high) in ERROR.items())
    return (
        "docs/do/measure_speed.md says what is left out, and qarl/bench/plan/assumptions.py has each assumed "
        "or estimated number. No GPU has been compared.\n"
        f"Error (predicted / measured) on a CPU, 11 steps of 135M parameters; larger for smaller models: {errors}."
    )
