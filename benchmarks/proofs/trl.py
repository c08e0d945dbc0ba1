"""QaRL under TRL on a CPU, each run in new processes, with the quickstart's model, data and settings."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.proofs.harness import (
    LEVELS,
    QUIET,
    ROOT,
    SCHEMES,
    TINY,
    Record,
    Row,
    Run,
    in_process,
)
from qarl.checkpoint.resumable import tensors_digest
from qarl.config.level import Level
from qarl.data.rewards import arithmetic
from qarl.quant.state_dict import low_bit_layers

SETTINGS: dict[str, Any] = {
    "model": str(TINY),
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
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


def train(settings: dict[str, Any]) -> Row:
    """Train as `settings` says, and return logs, digests and seconds of this process."""
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import TrainerCallback

    from qarl.trl import QaRLConfig, QaRLTrainer

    kill_at, resume, save = (
        settings.pop(key, None) for key in ("kill_at", "resume", "save_quantized")
    )
    row: Row = {"digests": {}}
    lora = settings.pop("lora", None)

    def trained() -> Any:
        adapters = trainer.policy.adapters
        return adapters.tensors().items() if adapters else trainer.policy.published_tensors()

    class Recorder(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            row["digests"][state.global_step] = tensors_digest(trained())
            if state.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    model = settings.pop("model")
    file = settings.pop("data")
    scored_by = settings.pop("reward", reward)
    data = load_dataset(
        Path(file).suffix[1:].replace("jsonl", "json"), data_files=file, split="train"
    )
    held_out = data.select(range(8)) if "eval_strategy" in settings else None
    more: dict[str, Any] = {"peft_config": LoraConfig(**lora)} if lora else {}
    if environment := settings.pop("environment", None):
        more["environment"] = environment
    trainer = QaRLTrainer(
        model, scored_by, QaRLConfig(**settings), data, held_out, callbacks=[Recorder()], **more
    )
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=resume)
    row |= {"seconds": time.perf_counter() - start, "level": trainer.policy.align}
    row["masters"] = tensors_digest(
        (str(i), value)
        for i, state in enumerate(trainer.create_optimizer().state.values())
        for value in [state["master"], state["exp_avg"], state["exp_avg_sq"]]
    )
    row["base_shared"] = base_shared(trainer) if trainer.policy.adapters else None
    row["history"] = [entry for entry in trainer.state.log_history if "loss" in entry]
    row["evaluations"] = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    if save:
        trainer.save_quantized(save)
        row["published"] = tensors_digest(trainer.policy.published_tensors())
    return row | {"process": trainer.accelerator.process_index}


def base_shared(trainer: Any) -> float:
    """Return the share of the base's bytes that are in the memory of the engine of this process."""
    addresses = {
        tensor.untyped_storage().data_ptr() for tensor in trainer.engine.weights.storage().values()
    }
    model = trainer.policy.model
    base: list[Any] = [p for p in model.parameters() if not p.requires_grad and not p.is_meta]
    for layer in low_bit_layers(model).values():
        base += [tensor for tensors in (layer.stored or {}).values() for tensor in tensors.values()]
    return sum(t.nbytes for t in base if t.untyped_storage().data_ptr() in addresses) / sum(
        t.nbytes for t in base
    )


def reward(completions: list[Any], reward_model: list[Any], **others: Any) -> list[float]:
    texts = [
        completion if isinstance(completion, str) else completion[0]["content"]
        for completion in completions
    ]
    if isinstance(completions[0], str):  # a random model of the tests, which knows no arithmetic
        return [float(len(set(text))) for text in texts]
    return [
        arithmetic("", text, row["ground_truth"])
        for text, row in zip(texts, reward_model, strict=True)
    ]


def run(settings: dict[str, Any], *, processes: int = 1, may_die: bool = False) -> list[Row]:
    """Run `train` in `processes` new processes. Return the row of each; nothing if they died and may."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"output_dir": str(Path(folder) / "run"), **SETTINGS, **settings}
        bands = BANDS if arguments.get("loss_type", "tbpo") != "tbpo" else ()
        groups = (
            ("quant_group_size",)
            if arguments.get("quant_scheme", "w4a16") not in ("w4a16", "w4a8")
            else ()
        )
        for unread in (*bands, *groups):
            arguments.pop(unread, None)
        launch = [
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            str(processes),
        ]
        launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        try:
            rows = in_process(
                train, arguments, launch=launch if processes > 1 else (), **ENVIRONMENT
            )
        except RuntimeError:
            if may_die:
                return []
            raise
        return sorted(rows, key=lambda row: int(row["process"]))


def mean(history: Sequence[Row], key: str) -> float:
    return sum(float(entry[key]) for entry in history) / len(history)


def trl_cpu(
    record: Record,
    *,
    parts: tuple[str, ...] = ("table", "reward", "processes", "resume"),
    schemes: tuple[str, ...] = SCHEMES,
    levels: tuple[str, ...] = LEVELS,
    seeds: tuple[int, ...] = (0, 1, 2),
    rollouts: int = 60,
) -> None:
    """Mismatch of each scheme and level, reward beside the local backend's, two processes, and a resume."""
    for scheme, level in ((s, v) for s in schemes for v in levels if "table" in parts):
        if record.wants(name := f"table | {scheme} | {level}"):
            (outcome,) = run({"quant_scheme": scheme, "quant_align": level, "max_steps": 10})
            history = outcome["history"]
            row: Row = {"applied": outcome["level"]}
            row |= {
                "abs_mean": mean(history, "mismatch/abs_mean"),
                "k3": mean(history, "mismatch/k3"),
            }
            row["abs_max"] = max(float(entry["mismatch/abs_max"]) for entry in history)
            record.add(name, row, ok=not Level(level).zero_mismatch or row["abs_max"] == 0)
    for seed in seeds if "reward" in parts else ():
        if record.wants(name := f"reward | trl | {seed}"):
            (outcome,) = run({"seed": seed, "max_steps": 2 * rollouts})
            rewards = [float(entry["reward"]) for entry in outcome["history"] if "reward" in entry]
            record.add(name, learned(rewards, outcome["seconds"] / rollouts))
        if record.wants(name := f"reward | local | {seed}"):
            record.add(name, local(seed, rollouts))
    if "processes" in parts and record.wants("processes"):
        row = two_processes()
        record.add("processes", row, ok=row["digests_equal"] and row["masters_equal"])
    if "resume" in parts and record.wants("resume"):
        row = resumed()
        record.add(
            "resume",
            row,
            ok=all(row["digests_equal"]) and row["masters_equal"] and row["metrics_equal"],
        )


def learned(rewards: Sequence[float], seconds: float) -> Row:
    """Return the mean reward of the first and the last five rollouts."""
    return {
        "first": sum(rewards[:5]) / 5,
        "last": sum(rewards[-5:]) / 5,
        "rollout_seconds": seconds,
    }


def local(seed: int, rollouts: int) -> Row:
    """Make the same run with `qarl train`. Seconds are its median step, since it has no common start."""
    settings = QUIET | {"seed": seed, "optim.lr_scheduler_type": "constant", "data.val_files": []}
    finished = Run.train(f"local-{seed}", ROOT / "runs" / "proofs" / "trl", "quickstart.yaml",
                     settings | {"trainer.total_training_steps": rollouts})  # fmt: skip
    steps = finished.steps
    seconds = sorted(entry["timing_s/step"] for entry in steps)
    return learned([entry["critic/score/mean"] for entry in steps], seconds[len(seconds) // 2])


def two_processes(**settings: Any) -> Row:
    """Ten optimizer steps on two processes: δ, and whether both published the same tensors after each step."""
    halves = {"per_device_train_batch_size": 24, "max_steps": 10, "logging_steps": 1}
    first, second = run(halves | settings, processes=2)
    return {
        "steps": len(first["digests"]),
        "digests_equal": first["digests"] == second["digests"],
        "masters_equal": first["masters"] == second["masters"],
        "abs_max": max(float(entry["mismatch/abs_max"]) for entry in first["history"]),
        "seconds": first["seconds"],
    }


def resumed(**settings: Any) -> Row:
    """A run of 12 steps, and one that is killed after step 9 and resumes from its checkpoint of step 6."""
    saving = {
        "max_steps": 12,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 6,
    } | settings
    (whole,) = run(saving)
    with tempfile.TemporaryDirectory() as folder:
        run(saving | {"output_dir": folder, "kill_at": 9}, may_die=True)
        checkpoints = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
        (rest,) = run(saving | {"output_dir": folder, "resume": str(Path(folder) / "checkpoint-6")})
    later = [str(step) for step in range(7, 13)]
    same = [
        {key: value for key, value in entry.items() if not key.endswith(("step_time", "_s"))}
        for entry in (*whole["history"], *rest["history"])
        if entry["step"] > 6
    ]
    return {
        "checkpoints_of_the_killed_run": checkpoints,
        "digests_equal": [whole["digests"][step] == rest["digests"][step] for step in later],
        "masters_equal": whole["masters"] == rest["masters"],
        "metrics_equal": same[:6] == same[-6:] and len(same) == 12,
    }
