"""A training step on each of twenty tasks of reasoning-gym, with the tiny model: data, run and scores.

The model's own answers are seldom right here; what the step shows is that every task passes through data file, check
of ground truths, rollout, reward and update. The scores of right, wrong, empty and garbled answers are compared with
those of entries that the library itself makes.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.proofs.align import tiny_copy
from benchmarks.proofs.gym_tasks import GYM_TASKS
from benchmarks.proofs.harness import QUIET, Record, Row, Run
from qarl.data.entry_text import to_text
from qarl.data.reasoning_gym_tasks import make_dataset
from qarl.data.rows import read_rows
from qarl.data.scoring import find_reward, score_rows
from qarl.sources.__main__ import main

POSITIONS = 4096
RESPONSE = 24
SEED = 1
GARBLED = ("", "x", "-1", "[[1", "{}", "1/0", "\x00é")
STEP: Row = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": POSITIONS - RESPONSE,
    "data.max_response_length": RESPONSE,
    "reward.function": "reasoning_gym",
    "rollout.n": 2,
    "rollout.cpu_kvcache_space_gib": 0.25,
    "actor.ppo_mini_batch_size": 4,
    "actor.ppo_micro_batch_size_per_gpu": 4,
    "actor.log_prob_micro_batch_size_per_gpu": 4,
    "trainer.total_training_steps": 1,
}
"""Four prompts, two responses each."""


def gym_tasks(
    record: Record,
    *,
    tasks: tuple[str, ...] = tuple(GYM_TASKS),
    size: int = 32,
    validation: int = 8,
) -> None:
    """Write the data of each task, take a step of the local backend at W4A16, and compare scores with the library's.

    `longest_question`: in characters. `delta_max`: largest |δ|, which must be 0. `reward`: mean of the step. `scores`:
    number of scores that were compared; `unequal` of them, and of the entries, differ, which must be 0."""
    root = Path("runs/proofs/gym_tasks").resolve()
    with tempfile.TemporaryDirectory() as parent:
        model = tiny_copy(Path(parent) / "model", max_position_embeddings=POSITIONS)
        for task in tasks:
            if record.wants(task):
                row = step(task, model, root, size, validation)
                record.add(task, row, ok=row["delta_max"] == 0 and row["unequal"] == 0)


def step(task: str, model: Path, root: Path, size: int, validation: int) -> Row:
    """Write the data of a task and take one step on them. Return the row of the result."""
    data = root / "data" / task
    words = [f"task={task}", f"size={size}", f"validation={validation}", f"seed={SEED}"]
    if main(["reasoning_gym", *words, f"out={data}", *GYM_TASKS[task]]):
        raise SystemExit(f"{task}: no data")
    files = {split: str(data / f"{split}.parquet") for split in ("validation", "train")}
    settings = QUIET | STEP | {
        "model.path": str(model),
        "data.train_files": [files["train"]],
        "data.val_files": [files["validation"]],
    }  # fmt: skip
    run = Run.train(task, root, "quickstart.yaml", settings)
    if run.code:
        raise SystemExit(f"{task}: {run.error}")
    (logged,) = run.steps
    rows = [row for file in files.values() for row in read_rows(file)]
    compared, unequal = compare(task, rows)
    return {
        "parameters": " ".join(GYM_TASKS[task]),
        "longest_question": max(len(row["prompt"][0]["content"]) for row in rows),
        "reward": logged["critic/score/mean"],
        "delta_max": logged["mismatch/abs_max"],
        "scores": compared,
        "unequal": unequal,
    }


def compare(task: str, rows: list[Any]) -> tuple[int, int]:
    """Return how many scores of the reward were compared with the library's, and how many of them, or of the entries of
    the rows, differ."""
    parameters = dict(word.split("=") for word in GYM_TASKS[task])
    random.seed(SEED)
    np.random.seed(SEED)
    library = make_dataset(task, parameters, seed=SEED, size=1000)
    entries: dict[str, Any] = {}
    for index in range(5 * len(rows)):
        entry = library[index]
        entries.setdefault(entry["question"], entry)
    calls = []
    expected = []
    unequal = 0
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        entry = entries[row["prompt"][0]["content"]]
        unequal += row["extra_info"]["entry"] != to_text(entry)
        wrong = entries[other["prompt"][0]["content"]]["answer"]
        for answer in [*filter(None, (entry["answer"], wrong)), *GARBLED]:
            calls.append({"data_source": "", "solution_str": answer, "ground_truth": ""})
            calls[-1]["extra_info"] = row["extra_info"]
            expected.append(own_score(library, answer, entry))
    reward = find_reward("reasoning_gym", 1)
    scores = score_rows(reward, calls, [""] * len(calls), timeout_s=60)
    reward.stop()
    return len(scores), unequal + sum(a != b for a, b in zip(scores, expected, strict=True))


def own_score(library: Any, answer: str, entry: Row) -> float:
    """Return the library's score, or 0 where it raises an exception."""
    try:
        return float(library.score_answer(answer.strip(), entry))
    except Exception:  # scorers raise many types for text that is no answer
        return 0.0
