"""SmolLM2-135M-Instruct with a calculator: a product of two numbers, then a sum, then the answer.

The model cannot calculate such a problem in its head. Two worked conversations before each problem show how to ask the
calculator, so that it begins with some right answers and the reward has something to raise. One seed, 60 steps.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from benchmarks.proofs.harness import Record, Row, Run
from benchmarks.proofs.turns import FOLDER
from qarl.demo.calculator import calculated

SYSTEM = (
    "You have a calculator. Write one operation, such as 384*57, and you get its result. "
    "Write = and the number when you know the answer."
)
EXAMPLES = ((47, 38, 615), (82, 64, 309))
SIZES = {"train": 600, "validation": 70}
SETTINGS: Row = {
    "data.max_prompt_length": 320,
    "data.max_response_length": 120,
    "multi_turn.max_turn_length": 16,
    "reward.function": "environment",
    "rollout.environment": f"{Path(__file__).resolve()}:answer",
    "optim.lr": 2.0e-5,
    "trainer.val_max_prompts": SIZES["validation"],
    "trainer.save_final": False,
    "trainer.plots": False,
    "trainer.logger": ["console"],
}
ARMS: Mapping[str, Row] = {
    "model": {},
    "off": {"quant.align": "off"},
    "one turn": {"multi_turn.max_assistant_turns": 1},
}
_OPERATION = re.compile(r"(\d{1,9}) ?([+*-]) ?(\d{1,9})")


def answer(messages: list[dict[str, Any]], ground_truth: str, **_: Any) -> Any:
    """Return the result of an operation, or end the conversation with 1 for the right number, else 0."""
    turn = str(messages[-1]["content"]).strip()
    found = _OPERATION.fullmatch(turn)
    if found:
        return calculated("".join(found.groups()))
    return {"reply": None, "reward": float(turn.removeprefix("=").strip() == ground_truth)}


def worked(left: int, right: int, added: int) -> list[dict[str, str]]:
    """Return the conversation about left * right + added."""
    product = left * right
    texts = (
        f"{left}*{right}+{added}",
        f"{left}*{right}",
        str(product),
        f"{product}+{added}",
        str(product + added),
        f"={product + added}",
    )
    roles = ("user", "assistant") * 3
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


def write_problems(folder: Path, seed: int = 0) -> None:
    """Write the problems, none of them twice, in verl's schema."""
    shown = [message for example in EXAMPLES for message in worked(*example)]
    draw = random.Random(seed)
    numbers = set(EXAMPLES)
    for split, size in SIZES.items():
        rows: list[Row] = []
        while len(rows) < size:
            left, right, added = draw.randint(12, 99), draw.randint(12, 99), draw.randint(100, 999)
            if (left, right, added) in numbers:
                continue
            numbers.add((left, right, added))
            prompt = [{"role": "system", "content": SYSTEM}, *shown, worked(left, right, added)[0]]
            truth = {"style": "rule", "ground_truth": str(left * right + added)}
            rows.append({"data_source": "calculator", "prompt": prompt, "reward_model": truth})
        Dataset.from_list(rows).to_parquet(str(folder / f"{split}.parquet"))


def turn_real_weights(
    record: Record, *, arms: tuple[str, ...] = tuple(ARMS), steps: int = 60, scheme: str = "w8a8"
) -> None:
    """Accuracy before and after, and the largest |δ|, which is 0 at the default level."""
    with tempfile.TemporaryDirectory() as folder:
        write_problems(Path(folder))
        for arm in arms:
            if not record.wants(name := f"{scheme} | {arm}"):
                continue
            settings = SETTINGS | ARMS[arm] | {
                "data.train_files": [f"{folder}/train.parquet"],
                "data.val_files": [f"{folder}/validation.parquet"],
                "quant.scheme": scheme,
                "trainer.total_training_steps": steps,
                "trainer.test_freq": steps // 2,
            }  # fmt: skip
            run = Run.train(f"smollm2-{arm}".replace(" ", "_"), FOLDER, "smollm2.yaml", settings)
            if run.code:
                raise RuntimeError("\n".join(run.error))
            row = outcome(run.history, run.steps)
            record.add(name, row, ok=arm == "off" or row["largest_abs_delta"] == 0)


def outcome(history: Sequence[Row], steps: Sequence[Row]) -> Row:
    """Return the accuracies of the validations, and what the steps logged of turns and δ."""
    accuracies = {
        str(entry["step"]): round(float(entry["val/accuracy"]), 4)
        for entry in history
        if "val/accuracy" in entry
    }
    return {
        "steps": len(steps),
        "accuracy": accuracies,
        "largest_abs_delta": max(float(step["mismatch/abs_max"]) for step in steps),
        "turns": [round(float(step["turns/mean"]), 2) for step in (steps[0], steps[-1])],
        "seconds": round(sum(float(step["timing_s/step"]) for step in steps), 1),
    }
