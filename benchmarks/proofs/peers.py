"""A step of real weights in this project and in its peers: same model, task, batch and cores, interleaved.

Every row is a run in new processes, bound to the same cores. The arms take turns, round by round, so a machine
that becomes slower does so for all of them. Peers generate as their users have it on a CPU: TRL with transformers'
`generate`, and BF16 weights; verl with vLLM, as the CPU platform of this project runs it, at level `off`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.proofs.harness import QUIET, ROOT, Record, Row, Run, in_process
from benchmarks.proofs.real_weights import MODEL, sums, write_rows

ROWS = 4
RESPONSES = 8
LENGTH = 24
RATE = 1e-5
LOCAL: dict[str, Row] = {
    "qarl w8a8": {"quant.scheme": "w8a8"},
    "qarl w4a16": {"quant.scheme": "w4a16", "quant.group_size": 32},
    "qarl bf16": {"quant.scheme": "bf16"},
    "qarl w8a8 adapters": {"quant.scheme": "w8a8", "lora.r": 8, "optim.lr": 1e-4},
}
"""Arm -> its keys. All are at the default level."""
VERL: dict[str, Row] = {"verl bf16": {"quant.scheme": "bf16", "quant.align": "off"}}
TRL = "trl bf16"
ARMS = (TRL, *VERL, *LOCAL)
PHASES = {
    "local": ("rollout", "old_log_prob", "update", "publish"),
    "verl": ("gen", "old_log_prob", "update_actor", "update_weights"),
}
TRL_FOLDER = ROOT / ".venv" / "trl"


def real_peers(
    record: Record,
    *,
    arms: tuple[str, ...] = ARMS,
    rounds: int = 2,
    steps: int = 4,
    cores: int = 1,
) -> None:
    """Take `steps` steps in each arm, and again in the next round. The first step of a run is not counted."""
    for number in range(1, rounds + 1):
        for arm in arms:
            name = f"{arm} | {cores} cores | round {number}"
            if not record.wants(name):
                continue
            with tempfile.TemporaryDirectory() as folder, bound_to(cores):
                row = one_run(arm, Path(folder), steps)
            record.add(name, row, ok=bool(row.get("step_s")))


def one_run(arm: str, folder: Path, steps: int) -> Row:
    """Return seconds, tokens and memory of one run of an arm."""
    data = folder / "train.jsonl"
    write_rows(data, sums(64))
    with peak_memory() as memory:
        if arm == TRL:
            path = os.pathsep.join([str(TRL_FOLDER), str(ROOT)])
            environment = {
                "PYTHONPATH": path,
                "ACCELERATE_USE_CPU": "true",
                "HF_HUB_OFFLINE": "1",
                "TRL_EXPERIMENTAL_SILENCE": "1",
            }
            threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
            (row,) = in_process(trl_steps, str(data), steps, **environment, **threads)
        else:
            row = run_steps(arm, data, folder, steps)
    return row | {"peak_mb": round(memory["peak_mb"])}


def run_steps(arm: str, data: Path, folder: Path, steps: int) -> Row:
    """Take the steps with `qarl train`, locally or in verl."""
    backend = "verl" if arm in VERL else "local"
    config = "quickstart_verl.yaml" if backend == "verl" else "quickstart.yaml"
    run = Run.train("run", folder, config, keys(data, steps) | (VERL | LOCAL)[arm])
    if run.code or len(run.steps) != steps:
        return {"error": run.error or run.text[-1500:]}
    counted = run.steps[1:]
    times = [entry["timing_s/step"] for entry in counted]
    phases = {
        phase: median([entry[f"timing_s/{phase}"] for entry in counted])
        for phase in PHASES[backend]
        if all(f"timing_s/{phase}" in entry for entry in counted)
    }
    lengths = [entry["response_length/mean"] for entry in counted]
    worst = max(entry["mismatch/abs_max"] for entry in run.steps)
    return figures(times, lengths) | {"phases": phases, "delta_max": worst}


def keys(data: Path, steps: int) -> Row:
    """Return the keys that all of this project's arms share."""
    return QUIET | {
        "model.path": str(MODEL),
        "data.train_files": [str(data)],
        "data.val_files": [],
        "data.train_batch_size": ROWS,
        "data.max_prompt_length": 96,
        "data.max_response_length": LENGTH,
        "reward.function": f"{ROOT / 'benchmarks' / 'proofs' / 'lengths_reward.py'}:reward",
        "reward.check_ground_truths": False,
        "rollout.n": RESPONSES,
        "quant.mismatch_limit": 100.0,
        "actor.ppo_mini_batch_size": ROWS,
        "actor.ppo_micro_batch_size_per_gpu": ROWS * RESPONSES,
        "actor.log_prob_micro_batch_size_per_gpu": ROWS * RESPONSES,
        "optim.lr": RATE,
        "trainer.total_training_steps": steps,
        "trainer.num_threads": len(os.sched_getaffinity(0)),
    }


def trl_steps(data: str, steps: int) -> Row:
    """Take the steps with TRL's own GRPOTrainer in this process."""
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times: list[float] = []
    generated: list[float] = []

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            outputs = super()._generate_and_score_completions(inputs)
            generated.append(time.perf_counter() - start)
            return outputs

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            times.append(time.perf_counter() - self.start)

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=ROWS * RESPONSES,
            num_generations=RESPONSES,
            max_completion_length=LENGTH,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            beta=0.0,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": torch.bfloat16},
        )
        rows = load_dataset("json", data_files=data, split="train")
        trainer = Timed(str(MODEL), text_reward, settings, rows, callbacks=[Clock()])
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    lengths = [entry["completions/mean_length"] for entry in history][1:]
    phases = {
        "generate_and_score": median(generated[1:]),
        "update": median(times[1:]) - median(generated[1:]),
    }
    return figures(times[1:], lengths) | {"phases": phases}


def text_reward(completions: list[Any], **others: Any) -> list[float]:
    """Return the reward of `lengths_reward`, for TRL."""
    from benchmarks.proofs.lengths_reward import reward

    return [reward("", messages[0]["content"], "") for messages in completions]


def figures(times: Sequence[float], lengths: Sequence[float]) -> Row:
    """Return seconds a step and sampled tokens a second, of the steps that count."""
    tokens = statistics.fmean(lengths) * ROWS * RESPONSES
    step = median(times)
    return {
        "step_s": step,
        "steps": len(times),
        "length": round(statistics.fmean(lengths), 1),
        "tokens_per_s": round(tokens / step, 1),
    }


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


@contextmanager
def bound_to(cores: int) -> Iterator[None]:
    """Bind this process, and those that it starts, to the first `cores` cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:cores]))
    yield
    os.sched_setaffinity(0, before)


@contextmanager
def peak_memory(every: float = 0.5) -> Iterator[dict[str, float]]:
    """Measure the largest memory of all processes that this one started: unique memory, and each shared page once."""
    import psutil

    memory = {"peak_mb": 0.0}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every):
            total = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            memory["peak_mb"] = max(memory["peak_mb"], total / 2**20)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield memory
    ended.set()
    watcher.join()
