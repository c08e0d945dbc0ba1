"""Whole verl runs, one for each thing that is promised of them, and what they logged.

    python scripts/verl_runs_check.py --output benchmarks/results/verl_runs_cpu.json

The quickstart in verl at every alignment level, and `exact` on two ranks (two FSDP2 ranks, two copies of the rollout
engine) and with a KV cache so small that responses are put off; either half of QaRL by itself, from verl's own command
line (`scripts/verl_halves.sh`); GRPO with `bypass_mode`; four ranks, dense and with experts; a run whose trainer was
given another `rms_norm_eps` than the engine; and eight runs of ten steps on two ranks that cover every pair of scheme,
dense or experts, dtype of the masters, optimizer and packing.
Checked of every step: mean |δ| against the limit of the level, |δ| of every token if 0 is promised, preemptions if
there must be some. The mismatch guard must end the run with the other norm before its first update, and be silent in
the others.
`--cases` runs some of them and leaves the others in the file as they are. Each run has its date and commit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from qarl.metrics.mismatch_limit import resolve_limit
from qarl.metrics.tracker import METRICS_FILE, cpu, read_metrics, write_json

KEPT = ("mismatch/abs_mean", "mismatch/abs_max", "mismatch/k3", "mismatch/over_limit", "rollout/preemptions")
ALSO_KEPT = ("actor/pg_loss", "actor/inside_band_frac", "response_length/mean")


@dataclass(frozen=True)
class Case:
    """One run. `verl`: keys of verl's own. `half`: one of `scripts/verl_halves.sh`, from verl's own command line.

    `exact`: every token's |δ| must be 0. The level `exact` promises it always, `model` for up to 192 tokens.
    """

    what: str
    level: str
    settings: dict[str, Any] = field(default_factory=dict)
    verl: dict[str, Any] = field(default_factory=dict)
    half: str | None = None
    preempts: bool = False
    refused: bool = False
    steps: int = 2
    exact: bool = False


CONFIG = Path("configs/quickstart_verl.yaml")
COMMIT = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
FEW_BLOCKS = {"+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size": 32}
OTHER_NORM = {"+actor_rollout_ref.model.override_config.rms_norm_eps": 0.3}
CASES = {
    "off": Case("w4a16, one rank", "off"),
    "linears": Case("w4a16, one rank", "linears"),
    "model": Case("w4a16, one rank", "model"),
    "exact": Case("w4a16, one rank", "exact"),
    "exact_two_ranks": Case("w4a16, two ranks", "exact", {"trainer.n_gpus_per_node": 2}),
    "exact_preempted": Case(
        "w4a16, one rank, a KV cache for few responses",
        "exact",
        {"rollout.cpu_kvcache_space_gib": 0.002},
        verl=FEW_BLOCKS,
        preempts=True,
    ),
    "tbpo_alone": Case("the TBPO loss on verl's BF16 actor", "linears", half="tbpo"),
    "quantized_alone": Case("w4a16 with verl's vanilla loss", "model", half="quantized"),
    "bypass": Case(
        "w4a16, GRPO with bypass_mode",
        "model",
        {"actor.loss": "grpo", "rollout_correction.bypass_mode": "true"},
        exact=True,
    ),
    "other_norm": Case("w4a16, the trainer's rms_norm_eps set to 0.3", "model", verl=OTHER_NORM, refused=True),
}
ROUTERS = '[lm_head, "re:.*\\\\.mlp\\\\.gate$"]'


def pair(scheme: str, experts: bool, masters: str, optimizer: str, packed: bool) -> Case:
    """The case of one row of `tests/verl_backend/test_verl_log_probs.py`, with real engines."""
    settings = {
        "quant.scheme": scheme,
        "optim.name": optimizer,
        "optim.master_dtype": masters,
        "model.use_remove_padding": packed,
        "actor.use_dynamic_bsz": packed,
        "trainer.n_gpus_per_node": 2,
        "data.train_batch_size": 8,
        "actor.ppo_mini_batch_size": 4,
        "rollout.n": 4,
    }
    by_rows = {"actor.ppo_micro_batch_size_per_gpu": 4, "actor.log_prob_micro_batch_size_per_gpu": 8}
    by_tokens = dict.fromkeys(by_rows, "null") | {"actor.ppo_max_token_len_per_gpu": 400}
    settings |= by_tokens if packed else by_rows
    settings |= {"optim.muon_lr": 1e-3} if optimizer == "muon" else {}
    settings |= EXPERTS if experts else {}
    what = f"{scheme}, {'experts' if experts else 'dense'}, {masters} masters, {optimizer}, packed: {packed}"
    return Case(what, "model", settings, steps=10, exact=True)


SCHEMES = ("w4a16", "w8a8", "fp8", "bf16")
"""Four schemes and four columns of two values: every pair of two columns needs eight runs."""
FOUR = {"trainer.n_gpus_per_node": 4, "data.train_batch_size": 8, "actor.ppo_mini_batch_size": 4, "rollout.n": 4}
FOUR |= {"actor.ppo_micro_batch_size_per_gpu": 4, "actor.log_prob_micro_batch_size_per_gpu": 8}
EXPERTS = {"model.path": "models/tiny-qwen3-moe", "quant.ignore": ROUTERS}
CASES |= {
    "four_ranks": Case("w4a16, four ranks", "model", FOUR, exact=True),
    "four_ranks_experts": Case("w4a16, experts, four ranks", "model", FOUR | EXPERTS, exact=True),
}
CASES |= {
    f"pair_{scheme}_{r}": pair(
        scheme, bool(r ^ (s & 1) ^ (s >> 1)), ("fp32", "bf16")[r], ("muon", "adamw")[r ^ (s & 1)], bool(r ^ (s >> 1))
    )
    for s, scheme in enumerate(SCHEMES)
    for r in (0, 1)
}


def start(name: str, case: Case, root: Path) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, output and the logged steps of a run."""
    environment, log = os.environ | {"PYTHON": sys.executable, "FOLDER": str(root)}, root / f"{name}.log"
    if case.half:
        command = ["bash", "scripts/verl_halves.sh"]
        environment["HALVES"] = case.half
    else:
        settings = {
            "name": name,
            "output_dir": root,
            "quant.align": case.level,
            "trainer.total_training_steps": case.steps,
            "trainer.val_before_train": "false",
            "trainer.test_freq": -1,
            "trainer.save_final": "false",
            "trainer.plots": "false",
            "trainer.logger": "[console]",
            "trainer.resume_mode": "disable",
        } | case.settings
        given = [f"{key}={value}" for key, value in settings.items()]
        config = root / f"{name}.yaml"
        config.write_text(yaml.safe_dump(yaml.safe_load(CONFIG.read_text()) | {"verl": case.verl}))
        command = [sys.executable, "-m", "qarl.train", f"config={config}", *given]
        shutil.rmtree(root / name, ignore_errors=True)
    with log.open("wb") as file:
        code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    steps = logged_by_verl(root / f"{case.half}.jsonl") if case.half else logged_by_us(root / name)
    return code, log.read_text(encoding="utf-8", errors="replace"), steps


def logged_by_us(run_dir: Path) -> list[dict[str, Any]]:
    entries = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else []
    return [entry for entry in entries if "mismatch/abs_mean" in entry]


def logged_by_verl(file: Path) -> list[dict[str, Any]]:
    """With our names, if they are those of verl with `actor/` in front."""
    entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    renamed = [
        {name.replace("actor/mismatch/", "mismatch/"): value for name, value in entry["data"].items()}
        | {"step": entry["step"]}
        for entry in entries
    ]
    return [entry for entry in renamed if "mismatch/abs_mean" in entry]


def result(name: str, case: Case, root: Path) -> dict[str, Any]:
    begin = time.monotonic()
    code, text, logged = start(name, case, root)
    steps, limits = [], []
    for entry in logged:
        kept = {key: entry[key] for key in (*KEPT, *ALSO_KEPT) if key in entry}
        limits.append(resolve_limit(None, case.level, response_length=entry["response_length/mean"]))
        steps.append({"step": entry["step"], "limit": limits[-1]} | kept)
    error = text[text.rfind("\nerror: ") + 1 :].strip().splitlines()[:4] if code else []
    fired = any("trainer and engine disagree" in line for line in error)
    within = all(step["mismatch/abs_mean"] <= step["limit"] and not step["mismatch/over_limit"] for step in steps)
    exact = not (case.exact or case.level == "exact") or all(step["mismatch/abs_max"] == 0 for step in steps)
    preempted = not case.preempts or all(step["rollout/preemptions"] > 0 for step in steps)
    healthy = code == 0 and not fired and len(steps) == case.steps and within and exact and preempted
    return {
        "what": case.what,
        "date": str(datetime.date.today()),
        "commit": COMMIT,
        "cpu": cpu(),
        "level": case.level,
        "exit_code": code,
        "seconds": round(time.monotonic() - begin, 1),
        "steps": steps,
        "guard_fired": fired,
        "error": error,
        "ok": code == 2 and fired and not steps if case.refused else healthy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--root", type=Path, default=Path("runs/verl_runs_check"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.root = args.root.resolve()
    args.root.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = {}
    if args.output and args.output.is_file() and set(args.cases) != set(CASES):
        kept = json.loads(args.output.read_text(encoding="utf-8"))["runs"]
    for name in args.cases:
        kept[name] = result(name, CASES[name], args.root)
        print(name, json.dumps(kept[name], ensure_ascii=False), flush=True)
        runs = {case: kept[case] for case in CASES if case in kept}
        if args.output:
            write_json(args.output, {"runs": runs, "ok": all(run["ok"] for run in runs.values())})
    sys.exit(0 if all(kept[name]["ok"] for name in args.cases) else 1)


if __name__ == "__main__":
    main()
