"""QaRL under TRL on a CPU: mismatch by scheme and level, reward beside the local backend's, two processes, a resume.

    OMP_NUM_THREADS=1 python scripts/trl_cpu.py WHAT [WHAT ...] --output result.json

WHAT is one of

    table       mean and largest |δ| of each scheme and level
    reward      60 rollouts from each of 3 seeds, and the same with the local backend
    processes   two processes under `accelerate launch`
    resume      a run that is killed and resumes

Each run is a new process, with the quickstart's model, data and settings (`make model` makes both).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.checkpoint.json_file import write_json
from qarl.data.rewards import arithmetic
from qarl.metrics.tracker import write_versions

ROOT = Path(__file__).resolve().parents[1]
LEVELS = ("off", "linears", "model", "exact")
SCHEMES = ("bf16", "w4a16", "w8a8", "fp8")
SETTINGS: dict[str, Any] = {
    "model": str(ROOT / "models/tiny-qwen3"),
    "data": str(ROOT / "data/column_addition/train.parquet"),
    "report_to": "none",
    "logging_steps": 2,
    "per_device_train_batch_size": 48,
    "steps_per_generation": 2,
    "num_generations": 8,
    "learning_rate": 1.5e-4,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.999,
    "max_completion_length": 80,
    "gradient_checkpointing": False,
    "quant_group_size": 32,
    "vllm_cpu_kvcache_space_gib": 0.25,
    "seq_clip_ratio_high": 0.01,
    "neg_seq_clip_ratio_low": 0.008,
    "neg_seq_clip_ratio_high": 0.015,
    "save_strategy": "no",
    "use_cpu": True,
}
"""The quickstart's settings in TRL's words. One rollout serves two optimizer steps, which TRL counts as steps."""
BANDS = ("seq_clip_ratio_high", "neg_seq_clip_ratio_low", "neg_seq_clip_ratio_high")


def train(settings: dict[str, Any], output: Path) -> None:
    """Train as `settings` says, and write logs, digests and seconds of this process to `output`."""
    from datasets import load_dataset
    from transformers import TrainerCallback

    from qarl.trl import QaRLConfig, QaRLTrainer

    kill_at, resume, save = (settings.pop(key, None) for key in ("kill_at", "resume", "save_quantized"))
    found: dict[str, Any] = {"digests": {}}

    class Record(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            found["digests"][state.global_step] = digest(trainer.policy.quantize())
            if state.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    model, file = settings.pop("model"), settings.pop("data")
    data = load_dataset(Path(file).suffix[1:].replace("jsonl", "json"), data_files=file, split="train")
    held_out = data.select(range(8)) if "eval_strategy" in settings else None
    trainer = QaRLTrainer(model, reward, QaRLConfig(**settings), data, held_out, callbacks=[Record()])
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=resume)
    found["seconds"] = time.perf_counter() - start
    found["level"] = trainer.policy.align
    found["masters"] = digest(
        (str(i), value)
        for i, state in enumerate(trainer.create_optimizer().state.values())
        for value in [state["master"], state["exp_avg"], state["exp_avg_sq"]]
    )
    found["history"] = [one for one in trainer.state.log_history if "loss" in one]
    found["evaluations"] = [one for one in trainer.state.log_history if "eval_reward" in one]
    if save:
        trainer.save_quantized(save)
        found["published"] = digest(sorted(trainer.policy.quantize()))
    output.with_suffix(f".{trainer.accelerator.process_index}.json").write_text(json.dumps(found))


def reward(completions: list[Any], reward_model: list[Any], **others: Any) -> list[float]:
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    if isinstance(completions[0], str):  # a random model of the tests, which knows no arithmetic
        return [float(len(set(text))) for text in texts]
    return [arithmetic("", text, row["ground_truth"]) for text, row in zip(texts, reward_model, strict=True)]


def digest(tensors: Any) -> str:
    import torch

    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def run(settings: dict[str, Any], *, processes: int = 1, may_die: bool = False) -> list[dict[str, Any]]:
    """Run `train` in `processes` new processes. Return what each wrote; nothing if they died and may."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        given = {"output_dir": str(Path(folder) / "run"), **SETTINGS, **settings}
        bands = BANDS if given.get("loss_type", "tbpo") != "tbpo" else ()
        groups = ("quant_group_size",) if given.get("quant_scheme", "w4a16") not in ("w4a16", "w4a8") else ()
        for unread in (*bands, *groups):
            given.pop(unread, None)
        command = [sys.executable, __file__, "--train", json.dumps(given), "--output", str(output)]
        if processes > 1:
            launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
            launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
            command = [sys.executable, *launch, *command[1:]]
        environment = os.environ | {
            "ACCELERATE_USE_CPU": "true",
            "HF_HUB_OFFLINE": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode and not may_die:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("found.*.json"))]


def mean(history: Sequence[dict[str, Any]], key: str) -> float:
    return sum(float(one[key]) for one in history) / len(history)


def table() -> list[dict[str, Any]]:
    """Mean and largest |δ| over five rollouts, ten optimizer steps, of each scheme at each level."""
    rows = []
    for scheme in SCHEMES:
        for level in LEVELS:
            (found,) = run({"quant_scheme": scheme, "quant_align": level, "max_steps": 10})
            history = found["history"]
            row = {"scheme": scheme, "level": level, "applied": found["level"]}
            row |= {"abs_mean": mean(history, "mismatch/abs_mean"), "k3": mean(history, "mismatch/k3")}
            row["abs_max"] = max(float(one["mismatch/abs_max"]) for one in history)
            print(row, flush=True)
            rows.append(row)
    return rows


def reward_beside_local(seeds: Sequence[int] = (0, 1, 2), rollouts: int = 60) -> list[dict[str, Any]]:
    """Mean reward of the first and last five rollouts, under TRL and with the local backend."""
    rows = []
    for seed in seeds:
        (found,) = run({"seed": seed, "max_steps": 2 * rollouts})
        rewards = [float(one["reward"]) for one in found["history"] if "reward" in one]
        rows.append(_learned("trl", seed, rewards, found["seconds"] / rollouts))
        rows.append(local(seed, rollouts))
        print(*rows[-2:], sep="\n", flush=True)
    return rows


def _learned(backend: str, seed: int, rewards: Sequence[float], seconds: float) -> dict[str, Any]:
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    return {"backend": backend, "seed": seed, "first": first, "last": last, "seconds_a_rollout": seconds}


def local(seed: int, rollouts: int) -> dict[str, Any]:
    """The same run with `python -m qarl.train`. Seconds are its median step, since it has no common start."""
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "config": "quickstart.yaml",
            "name": "local",
            "output_dir": folder,
            "seed": seed,
            "optim.lr_scheduler_type": "constant",
            "trainer.total_training_steps": rollouts,
            "trainer.test_freq": -1,
            "trainer.val_before_train": "false",
            "data.val_files": "[]",
            "trainer.save_final": "false",
            "trainer.plots": "false",
            "trainer.logger": "[console]",
        }
        command = [sys.executable, "-m", "qarl.train", *(f"{key}={value}" for key, value in given.items())]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        lines = (Path(folder) / "local" / "metrics.jsonl").read_text().splitlines()
    steps = [one for one in map(json.loads, lines) if one["step"] > 0]
    seconds = sorted(
        one["perf/time_per_step"] if "perf/time_per_step" in one else one["timing_s/step"] for one in steps
    )
    return _learned("local", seed, [one["critic/score/mean"] for one in steps], seconds[len(seconds) // 2])


def processes() -> dict[str, Any]:
    """Ten optimizer steps on two processes: δ, and whether both published the same tensors after each step."""
    halves = {"per_device_train_batch_size": 24, "max_steps": 10, "logging_steps": 1}
    first, second = run(halves, processes=2)
    return {
        "steps": len(first["digests"]),
        "digests_equal": first["digests"] == second["digests"],
        "masters_equal": first["masters"] == second["masters"],
        "abs_max": max(float(one["mismatch/abs_max"]) for one in first["history"]),
        "seconds": first["seconds"],
    }


def resume() -> dict[str, Any]:
    """A run of 12 steps, and one that is killed after step 9 and resumes from its checkpoint of step 6."""
    saving = {"max_steps": 12, "logging_steps": 1, "save_strategy": "steps", "save_steps": 6}
    (whole,) = run(saving)
    with tempfile.TemporaryDirectory() as folder:
        run(saving | {"output_dir": folder, "kill_at": 9}, may_die=True)
        checkpoints = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
        (rest,) = run(saving | {"output_dir": folder, "resume": str(Path(folder) / "checkpoint-6")})
    later = [str(step) for step in range(7, 13)]
    varying = ("step_time", "_s")
    same = [
        {key: value for key, value in one.items() if not key.endswith(varying)}
        for one in (*whole["history"], *rest["history"])
        if one["step"] > 6
    ]
    return {
        "checkpoints_of_the_killed_run": checkpoints,
        "digests_equal": [whole["digests"][step] == rest["digests"][step] for step in later],
        "masters_equal": whole["masters"] == rest["masters"],
        "metrics_equal": same[:6] == same[-6:] and len(same) == 12,
        "differing": sorted(
            {key for a, b in zip(same[:6], same[-6:], strict=True) for key in a if a[key] != b.get(key)}
        ),
    }


WHAT = {"table": table, "reward": reward_beside_local, "processes": processes, "resume": resume}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*WHAT, []], metavar="WHAT")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.train:
        train(json.loads(given.train), given.output)
        return
    found = json.loads(given.output.read_text()) if given.output.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        found["versions"] = json.loads(write_versions(folder).read_text())
    for what in given.what:
        found[what] = WHAT[what]()
        print(what, json.dumps(found[what]), flush=True)
        write_json(given.output, found)


if __name__ == "__main__":
    main(sys.argv[1:])
