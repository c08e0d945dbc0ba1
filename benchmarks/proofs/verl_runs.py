"""Whole runs in verl: mismatch, ranks, and two runs on a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.proofs.align import random_twin
from benchmarks.proofs.harness import LEVELS, QUIET, ROOT, TINY, Record, Row, Run, timed
from qarl.config.level import Level
from qarl.metrics.mismatch_limit import resolve_limit

CONFIG = "quickstart_verl.yaml"
FOLDER = ROOT / "runs" / "proofs"
ONCE = QUIET | {"trainer.resume_mode": "disable"}
METRICS = ("mismatch/abs_mean", "mismatch/abs_max", "mismatch/k3", "mismatch/over_limit", "rollout/preemptions",
        "actor/pg_loss", "actor/inside_band_frac", "response_length/mean")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run. `verl`: keys of verl's own. `half`: one of verl_halves.sh, from verl's own command line.

    `exact`: every token's |δ| must be 0. The level `exact` promises it always, `model` for up to 192 tokens.
    """

    what: str
    level: str
    settings: Row = field(default_factory=dict)
    verl: Row = field(default_factory=dict)
    half: str | None = None
    preempts: bool = False
    refused: bool = False
    steps: int = 2
    exact: bool = False


FEW_BLOCKS = {"+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size": 32}
OTHER_NORM = {"+actor_rollout_ref.model.override_config.rms_norm_eps": 0.3}
EXPERTS = {
    "model.path": "models/tiny-qwen3-moe",
    "quant.ignore": ["lm_head", "re:.*\\.mlp\\.gate$"],
}
BYPASS = {"actor.loss": "grpo", "rollout_correction.bypass_mode": True}
CASES: dict[str, Case] = {
    **{level: Case("w4a16, one rank", level) for level in LEVELS},
    "exact_two_ranks": Case("w4a16, two ranks", "exact", {"trainer.n_gpus_per_node": 2}),
    "exact_preempted": Case("w4a16, one rank, a KV cache for few responses", "exact",
                            {"rollout.cpu_kvcache_space_gib": 0.002}, verl=FEW_BLOCKS, preempts=True),
    "tbpo_alone": Case("the TBPO loss on verl's BF16 actor", "linears", half="tbpo"),
    "quantized_alone": Case("w4a16 with verl's vanilla loss", "model", half="quantized"),
    "bypass": Case("w4a16, GRPO with bypass_mode", "model", BYPASS, exact=True),
    "other_norm": Case("w4a16, the trainer's rms_norm_eps set to 0.3", "model", verl=OTHER_NORM, refused=True),
}  # fmt: skip

FOUR: Row = {
    "trainer.n_gpus_per_node": 4,
    "data.train_batch_size": 8,
    "actor.ppo_mini_batch_size": 4,
    "actor.ppo_micro_batch_size_per_gpu": 4,
    "actor.log_prob_micro_batch_size_per_gpu": 8,
    "rollout.n": 4,
}
CASES |= {
    "four_ranks": Case("w4a16, four ranks", "model", FOUR, exact=True),
    "four_ranks_experts": Case("w4a16, experts, four ranks", "model", FOUR | EXPERTS, exact=True),
}


def pair(scheme: str, experts: bool, masters: str, optimizer: str, packed: bool) -> Case:
    """Return a run of ten steps on two ranks. A BF16 run has no kernels of vLLM's, and is exact all the same."""
    settings = FOUR | {
        "quant.scheme": scheme,
        "optim.name": optimizer,
        "optim.master_dtype": masters,
        "model.use_remove_padding": packed,
        "actor.use_dynamic_bsz": packed,
        "trainer.n_gpus_per_node": 2,
    }
    if packed:
        settings |= {name: None for name in FOUR if "micro_batch" in name} | {
            "actor.ppo_max_token_len_per_gpu": 400
        }
    settings |= {"optim.muon_lr": 1e-3} if optimizer == "muon" else {}
    settings |= EXPERTS if experts else {}
    what = f"{scheme}, {'experts' if experts else 'dense'}, {masters} masters, {optimizer}, packed: {packed}"
    return Case(what, "model", settings, steps=10, exact=True)


PAIRS = {
    f"pair_{scheme}_{r}": pair(
        scheme,
        bool(r ^ (s & 1) ^ (s >> 1)),
        ("fp32", "bf16")[r],
        ("muon", "adamw")[r ^ (s & 1)],
        bool(r ^ (s >> 1)),
    )
    for s, scheme in enumerate(("w4a16", "w8a8", "fp8", "bf16"))
    for r in (0, 1)
}
"""Four schemes and four columns of two values: every pair of two columns needs eight runs."""


def start(name: str, case: Case, root: Path) -> tuple[int, list[str], list[Row]]:
    """Return exit code, error and the logged steps of a run."""
    if case.half:
        env = os.environ | {"PYTHON": sys.executable, "FOLDER": str(root), "HALVES": case.half}
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{name}.log").open("wb") as log:
            code = subprocess.run(
                ["bash", "benchmarks/proofs/verl_halves.sh"],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=log,
            )
        return code.returncode, [], logged_by_verl(root / f"{case.half}.jsonl")
    settings = (
        ONCE
        | {"quant.align": case.level, "trainer.total_training_steps": case.steps}
        | case.settings
    )
    run = Run.train(name, root, CONFIG, settings, verl=case.verl)
    return run.code, run.error, run.steps


def logged_by_verl(file: Path) -> list[Row]:
    """Return the steps with our names, if they are those of verl with `actor/` in front."""
    rows = []
    for entry in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        data = {
            name.replace("actor/mismatch/", "mismatch/"): value
            for name, value in entry["data"].items()
        }
        rows.append(data | {"step": entry["step"]})
    return [entry for entry in rows if "mismatch/abs_mean" in entry]


def judged(case: Case, code: int, error: list[str], logged: list[Row]) -> tuple[Row, bool]:
    """Return the row of a run, and whether it is as it should be."""
    steps = [
        {
            "step": entry["step"],
            "limit": resolve_limit(
                None, Level(case.level), response_length=entry["response_length/mean"]
            ),
        }
        | {key: entry[key] for key in METRICS if key in entry}
        for entry in logged
    ]
    fired = any("trainer and engine disagree" in line for line in error)
    within = all(
        step["mismatch/abs_mean"] <= step["limit"] and not step["mismatch/over_limit"]
        for step in steps
    )
    exact = not (case.exact or Level(case.level).zero_mismatch) or all(
        step["mismatch/abs_max"] == 0 for step in steps
    )
    preempted = not case.preempts or all(step["rollout/preemptions"] > 0 for step in steps)
    healthy = (
        code == 0 and not fired and len(steps) == case.steps and within and exact and preempted
    )
    row = {
        "what": case.what,
        "level": case.level,
        "exit_code": code,
        "steps": steps,
        "guard_fired": fired,
    }
    return row | {"error": error}, code == 2 and fired and not steps if case.refused else healthy


def _runs(record: Record, cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        if record.wants(name):
            spent: Row = {}
            with timed(spent):
                outcome = start(name, case, FOLDER / "verl_runs")
            row, ok = judged(case, *outcome)
            record.add(name, row | spent, ok=ok)


def verl_runs(record: Record) -> None:
    """Runs at every level, on two and four ranks, preempted, each half of QaRL alone, and one that must be stopped."""
    _runs(record, CASES)


def verl_pairs(record: Record) -> None:
    """Ten steps on two ranks: every pair of scheme, dense or experts, dtype of the masters, optimizer and packing."""
    _runs(record, PAIRS)


SMALL = {
    "data.train_batch_size": 4,
    "actor.ppo_mini_batch_size": 2,
    "actor.ppo_micro_batch_size_per_gpu": 4,
    "actor.log_prob_micro_batch_size_per_gpu": 8,
}


def verl_ranks(
    record: Record,
    *,
    kinds: tuple[str, ...] = ("dense", "experts"),
    ranks: tuple[int, ...] = (1, 2, 4),
) -> None:
    """30 steps at `model` on as many engines as ranks. verl does not seed its requests, so responses differ."""
    for kind, count in ((kind, count) for kind in kinds for count in ranks):
        if record.wants(name := f"{kind} | {count}"):
            settings = (
                SMALL | {"trainer.n_gpus_per_node": count} | (EXPERTS if kind == "experts" else {})
            )
            case = Case(name, "model", settings, steps=30)
            code, error, steps = start(name.replace(" | ", "_"), case, FOLDER / "verl_ranks")
            row: Row = {"exit_code": code, "steps": len(steps), "error": error}
            for key in ("k3", "abs_mean", "abs_max") if steps else ():
                values = [step[f"mismatch/{key}"] for step in steps]
                row |= {f"{key}_mean": sum(values) / len(values), f"{key}_max": max(values)}
            record.add(name, row, ok=code == 0 and len(steps) == 30)


def verl_two_runs(record: Record, *, steps: int = 10) -> None:
    """Two runs of one host at once, of two models that only their weights tell apart; both with δ = 0 at `exact`.

    Both start a Ray, so verl gives both one socket for their publishes. `other_model_abs_mean` is the mean |difference|
    of the two models' log-probs of random tokens, which an engine with the other's weights would have.
    """
    root = FOLDER / "verl_two_runs"
    with tempfile.TemporaryDirectory() as parent:
        models = {"first": TINY, "second": random_twin(Path(parent) / "twin")}
        settings = ONCE | {"quant.align": "exact", "trainer.total_training_steps": steps}
        runs = {
            n: Run.start(n, root, CONFIG, settings | {"model.path": model})
            for n, model in models.items()
        }
        for run in runs.values():
            run.process.wait()
        apart = other_model_abs_mean(list(models.values()))
    for name, run in runs.items():
        largest = max((entry["mismatch/abs_max"] for entry in run.steps), default=None)
        row = {"exit_code": run.code, "steps": len(run.steps), "largest_abs_delta": largest}
        row |= {"other_model_abs_mean": apart}
        record.add(
            name, row, ok=run.code == 0 and len(run.steps) == steps and largest == 0 and apart > 1
        )


@torch.no_grad()
def other_model_abs_mean(models: list[Path]) -> float:
    from transformers import AutoModelForCausalLM

    log_probs = []
    for model in models:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        tokens = torch.randint(
            3, loaded.config.vocab_size, (16, 64), generator=torch.Generator().manual_seed(0)
        )
        log_probs.append(
            loaded(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])
        )
    return float((log_probs[0] - log_probs[1]).abs().mean())
