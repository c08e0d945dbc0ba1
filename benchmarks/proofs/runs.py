"""Whole runs of the local backend: killed and resumed, with every objective, and driven to collapse."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.proofs.harness import QUIET, ROOT, Record, Row, Run, run_config, timed
from qarl.checkpoint.resumable import Checkpoint, list_checkpoints, open_checkpoint
from qarl.checkpoint.storage import file_sha256
from qarl.config.actor import REJECTIONS
from qarl.config.objectives import objective_names
from qarl.metrics.warning_signs import SignFinder
from qarl.trainer.local import LocalTrainer
from qarl.trainer.prepare import prepare_run

FOLDER = ROOT / "runs" / "proofs"
NOT_COMPARED = ("timing_s/", "startup/", "resume/", "checkpoint/")
"""Seconds, and what only one of two equal runs has."""
KILLED: dict[str, Row] = {
    "adamw, fp32 masters": {},
    "muon, bf16 masters": {
        "optim.name": "muon",
        "optim.muon_lr": 1e-3,
        "optim.master_dtype": "bf16",
        "quant.scheme": "w8a8",
    },
}


def kill_and_resume(record: Record, *, steps: int = 12, kills: int = 5, seed: int = 0) -> None:
    """Kill a run at random moments, and compare it with one that was left alone.

    Bit by bit: every metric of every step except seconds, and by digest weights, published tensors, the optimizer's
    state and the exported model. A moment of 4.3 is 30% of a step after step 4 was logged; if that was before, the kill
    comes in the start-up.
    """
    for name, changes in KILLED.items():
        if not record.wants(name):
            continue
        root = FOLDER / "kill_and_resume" / name.replace(", ", "_").replace(" ", "_")
        settings = QUIET | changes | {
            "trainer.save_final": True,
            "trainer.total_training_steps": steps,
            "trainer.save_freq": 2,
            "trainer.test_freq": 4,
            "trainer.val_max_prompts": 64,
        }  # fmt: skip
        reference = Run.train("reference", root, "quickstart.yaml", settings)
        Run.clear("killed", root)
        chance = random.Random(seed)
        moments = sorted(chance.uniform(0, steps - 1) for _ in range(kills))
        ended = [_kill(root, settings, moment, reference.summary) for moment in moments]
        run = Run.start("killed", root, "quickstart.yaml", settings)
        if reference.code or run.code:
            raise SystemExit(f"a run ended with an error, see {root}")
        differences, values = unequal(reference, run, steps)
        row = {
            "overrides": changes,
            "kills": ended,
            "compared_values": values,
            "differences": differences,
        }
        record.add(name, row, ok=not differences and all(kill["killed"] for kill in ended))


def _kill(root: Path, settings: Row, moment: float, summary: Row) -> Row:
    run, (steps, fraction) = (
        Run.start("killed", root, "quickstart.yaml", settings),
        divmod(moment, 1),
    )
    in_startup = run.step >= steps
    while not in_startup and run.process.poll() is None and run.step < steps:
        time.sleep(0.01)
    time.sleep(fraction * summary["seconds_to_first_step" if in_startup else "seconds_per_step"])
    alive = run.process.poll() is None
    if alive:
        os.kill(run.process.pid, signal.SIGKILL)
    folder = run.folder / "checkpoints"
    code = run.code
    return {
        "moment": round(moment, 3),
        "in_startup": in_startup,
        "killed": alive,
        "exit_code": code,
        "logged_step": run.step,
        "whole_checkpoints": [open_checkpoint(path).step for _, path in list_checkpoints(folder)],
        "left_over": sorted(
            p.name for p in folder.glob("*") if ".partial-" in p.name or ".old-" in p.name
        ),
    }


def unequal(reference: Run, killed: Run, steps: int) -> tuple[list[str], int]:
    """Return the differences between two runs, and how many values were compared."""
    whole, resumed = (
        {int(entry["step"]): _compared(entry) for entry in run.history}
        for run in (reference, killed)
    )
    differences = [f"step {step}: only one run has it" for step in whole.keys() ^ resumed.keys()]
    for step in sorted(whole.keys() & resumed.keys()):
        a = whole[step]
        b = resumed[step]
        names = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
        differences += [f"step {step}, {name}: {a.get(name)} {b.get(name)}" for name in names]
    parts = [
        _digests(open_checkpoint(run.folder / "checkpoints" / f"step_{steps}"))
        for run in (reference, killed)
    ]
    differences += [f"{part} differ" for part, value in parts[0].items() if parts[1][part] != value]
    exports = [
        file_sha256(run.folder / "export" / "model.safetensors") for run in (reference, killed)
    ]
    return differences + ["the exported models differ"] * (exports[0] != exports[1]), sum(
        map(len, whole.values())
    )


def _compared(metrics: Row) -> dict[str, str]:
    """Return the values that must be equal, in hexadecimal: NaN equals NaN, and 0.0 is not -0.0."""
    return {
        name: float(value).hex()
        for name, value in metrics.items()
        if not name.startswith(NOT_COMPARED)
        and not (name.startswith("publish/") and name.endswith("_s"))
    }


def _digests(checkpoint: Checkpoint) -> dict[str, Any]:
    state = checkpoint.state
    files = {
        name: state["files"][name]["sha256"]
        for name in ("model.safetensors", "optimizer.pt", "rng.pt")
    }
    return {name: state[name] for name in ("weights", "published", "sampler")} | files


OBJECTIVE_STEPS = 2
IS = "rollout_correction.rollout_is"
RS = "rollout_correction.rollout_rs"
GRPO: Row = {"actor.loss": "grpo"}
BYPASS = GRPO | {"rollout_correction.bypass_mode": True}


def rejection(*kinds: str, threshold: float = 0.5) -> Row:
    return {RS: list(kinds), f"{RS}_threshold": [threshold]}


TIS = GRPO | {IS: "token", f"{IS}_threshold": 2.0}
OBJECTIVES: dict[str, Row] = {
    **{loss: {"actor.loss": loss} for loss in objective_names()},
    "rloo": GRPO | {"algorithm.adv_estimator": "rloo"},
    "dr_grpo": GRPO | {"algorithm.adv_estimator": "dr_grpo"},
    "old_log_probs=rollout": GRPO | {"actor.old_log_probs": "rollout"},
    "old_log_probs=auto": {"actor.loss": "tbpo", "actor.old_log_probs": "auto"},
    "bypass": BYPASS,
    **{f"weight {level}": GRPO | {IS: level} for level in ("token", "sequence", "geometric")},
    **{
        f"weight token {mode}": GRPO | {IS: "token", f"{IS}_mode": mode}
        for mode in ("clip", "mask", "icepop")
    },
    "weight normalised": GRPO | {IS: "sequence", f"{IS}_batch_normalize": True},
    **{f"rejection {kind}": GRPO | rejection(kind) for kind in REJECTIONS},
    "rejection of r_ppo": GRPO | rejection("seq_sum_k3") | {f"{RS}_ratio": "ppo"},
    "veto": GRPO | {"rollout_correction.veto_threshold": 1e-4},
    "tbpo, rejection": {"actor.loss": "tbpo"} | rejection("seq_sum_k1"),
    "srs-k3-corr-ratio": BYPASS | rejection("seq_sum_k3", threshold=0.001),
    "tis-srs-k3-corr-ratio": TIS | rejection("seq_sum_k3", threshold=0.001),
    "tis-srs-k1-corr-ratio": TIS | rejection("seq_sum_k1", threshold=0.001),
}
IN_VERL = (
    *objective_names(), "rloo", "dr_grpo", "tis-srs-k3-corr-ratio", "srs-k3-corr-ratio", "weight normalised", "veto",
    "old_log_probs=rollout", "old_log_probs=auto",
)  # fmt: skip
SMALL: Row = {
    "data.train_batch_size": 6,
    "rollout.n": 4,
    "rollout.cpu_kvcache_space_gib": 0.25,
    "actor.ppo_mini_batch_size": 3,
    "actor.ppo_micro_batch_size_per_gpu": 12,
    "actor.log_prob_micro_batch_size_per_gpu": 24,
}
METRICS = (
    "actor/pg_loss", "actor/grad_norm", "actor/skipped_steps", "mismatch/abs_mean", "mismatch/abs_max",
    "critic/score/mean", "old_log_probs/recomputed", "correction/rejected_response_frac",
    "correction/rejected_token_frac", "correction/weight_mean", "actor/inside_band_frac", "actor/pg_clipfrac",
)  # fmt: skip


def needed(keys: Row) -> set[str]:
    """Return the metrics that a row must have."""
    names = {"actor/pg_loss", "actor/grad_norm", "mismatch/abs_mean", "mismatch/abs_max"}
    if RS in keys or any("veto" in name for name in keys):
        names |= {"correction/rejected_response_frac", "correction/rejected_token_frac"}
    if IS in keys or keys.get("actor.loss") == "mis_gspo":
        names.add("correction/weight_mean")
    if "actor.old_log_probs" in keys:
        names.add("old_log_probs/recomputed")
    return names | ({"actor/inside_band_frac"} if keys.get("actor.loss") == "tbpo" else set())


def judged(keys: Row, level: str, steps: Sequence[Row], bit: float) -> Row:
    """Return the metrics of a row's steps, and what is wrong with them."""
    wrong = (
        []
        if len(steps) == OBJECTIVE_STEPS
        else [f"{len(steps)} steps instead of {OBJECTIVE_STEPS}"]
    )
    for number, step in enumerate(steps, 1):
        rejected = step.get("correction/rejected_response_frac", 0.0)
        without = {"correction/weight_mean"} if rejected == 1 else set()
        wrong += [
            f"step {number} lacks {name}" for name in sorted(needed(keys) - step.keys() - without)
        ]
        numbers = {name: value for name, value in step.items() if isinstance(value, int | float)}
        wrong += [
            f"step {number}: {name}={value}"
            for name, value in numbers.items()
            if not math.isfinite(value)
        ]
        if not step.get("actor/grad_norm") and rejected < 0.5:
            wrong.append(f"step {number} has no gradient")
        if level == "model" and step.get("mismatch/abs_max", 0.0) > bit:
            wrong.append(f"step {number}: max |δ| is {step['mismatch/abs_max']}")
    logged = [{name: step[name] for name in METRICS if name in step} for step in steps]
    return {"keys": keys, "level": level, "steps": logged, "wrong": wrong}


def objectives(
    record: Record, *, backends: tuple[str, ...] = ("local", "verl"), bit: float = 1e-4
) -> None:
    """Take two steps with every objective, estimator, correction and source of old log-probs.

    local: in one process, at `off`, where there is a mismatch to correct, and at `model`. verl: some rows, at `model`.
    Both steps must have finite losses, gradients other than 0, and the metrics of their objective. `bit`: the largest
    |δ| at `model`: one BF16 step in the logit of an unlikely token is allowed.
    """
    engine = None
    with tempfile.TemporaryDirectory() as folder:
        for level, (name, keys) in (
            (v, item) for v in ("model", "off") for item in OBJECTIVES.items()
        ):
            if "local" in backends and record.wants(key := f"{name}, {level}"):
                settings = (
                    {"output_dir": folder, "quant.align": level, "trainer.val_max_prompts": 8}
                    | SMALL
                    | keys
                )
                config = run_config("quickstart.yaml", settings)
                trainer = LocalTrainer(config, prepare_run(config), engine)
                engine = trainer.engine
                trainer.publish()
                row = judged(
                    keys, level, [trainer.train_step() for _ in range(OBJECTIVE_STEPS)], bit
                )
                record.add(key, row, ok=not row["wrong"])
        if engine is not None:
            engine.close()
    settings = QUIET | {
        "trainer.total_training_steps": OBJECTIVE_STEPS,
        "rollout.cpu_kvcache_space_gib": 0.25,
    }
    for name in IN_VERL if "verl" in backends else ():
        if record.wants(key := f"{name}, verl"):
            folder_name = "".join(c if c.isalnum() else "_" for c in name)
            overrides = settings | {"trainer.resume_mode": "disable"} | OBJECTIVES[name]
            spent: Row = {}
            with timed(spent):
                run = Run.train(
                    folder_name, FOLDER / "objectives", "quickstart_verl.yaml", overrides
                )
            row = judged(OBJECTIVES[name], "model", run.steps, bit)
            row["wrong"] += [f"exit code {run.code}: {run.text[-300:]}"] if run.code else []
            record.add(key, row | spent, ok=not row["wrong"])


COLLAPSE: dict[str, Row] = {
    "collapse": {
        "quant.align": "off",
        "optim.lr": 2e-3,
        "optim.lr_scheduler_type": "constant",
        "optim.lr_warmup_steps": 200,
    },
    "healthy": {},
}
SMOOTH = 5
REWARD = "critic/score/mean"


def warning_signs(
    record: Record, *, seeds: tuple[int, ...] = (0, 1, 2), steps: int = 60, history: str = ""
) -> None:
    """Drive the quickstart to collapse, and let it be healthy: a warning must come before the fall, and only then.

    `history`: a pattern of folders of finished runs, whose signs are listed instead.
    """
    for folder in sorted(ROOT.glob(history)) if history else ():
        record.add(
            folder.name, seen(json.loads(line) for line in (folder / "metrics.jsonl").open())
        )
    for kind, seed in ((k, s) for s in seeds for k in COLLAPSE if not history):
        if record.wants(name := f"{kind} | {seed}"):
            settings = QUIET | {"seed": seed, "trainer.val_max_prompts": 16} | COLLAPSE[kind]
            settings |= {"trainer.total_training_steps": steps}
            run = Run.train(f"{kind}-{seed}", FOLDER / "warning_signs", "quickstart.yaml", settings)
            row = seen(run.history)
            record.add(name, row, ok=run.code == 0 and as_it_should(kind, row))


def fell_at(history: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the first step at which the reward, a mean of `SMOOTH` steps, is below half of its best value before."""
    steps = [(int(entry["step"]), float(entry[REWARD])) for entry in history if REWARD in entry]
    best = 0.0
    for end in range(SMOOTH, len(steps) + 1):
        mean = sum(value for _, value in steps[end - SMOOTH : end]) / SMOOTH
        if mean < best / 2:
            return steps[end - 1][0]
        best = max(best, mean)
    return None


def seen(history: Any) -> Row:
    """Return what a run shows: when its reward fell, its warnings, and its reward at both ends."""
    trained = [entry for entry in history if REWARD in entry]
    signs = SignFinder()
    rewards = [float(entry[REWARD]) for entry in trained]
    return {
        "steps": len(trained),
        "reward_first_10": sum(rewards[:10]) / max(1, len(rewards[:10])),
        "reward_last_10": sum(rewards[-10:]) / max(1, len(rewards[-10:])),
        "reward_fell_at_step": fell_at(trained),
        "warnings": [
            {name: getattr(sign, name) for name in ("sign", "step", "since_step", "text")}
            for entry in trained
            for sign in signs.add(int(entry["step"]), entry)
        ],
    }


def as_it_should(kind: str, row: Mapping[str, Any]) -> bool:
    fell = row["reward_fell_at_step"]
    warnings = row["warnings"]
    if kind == "healthy":
        return not warnings and fell is None
    return fell is not None and bool(warnings) and bool(warnings[0]["step"] < fell)
