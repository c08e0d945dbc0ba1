"""A run that would start, and faults of its config: for the trainer and the doctor, which must refuse the same ones."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

Refusal = Callable[..., str]
"""The fixture `refusal`: overrides and `words` -> the message of a proper refusal."""

CONFIG = """\
name: bad
model: {path: model}
data:
  train_files: train.jsonl
  val_files: [val.jsonl]
  train_batch_size: 4
  max_prompt_length: 16
  max_response_length: 16
rollout: {n: 2}
quant: {group_size: 32}
actor:
  ppo_mini_batch_size: 2
  ppo_micro_batch_size_per_gpu: 4
  log_prob_micro_batch_size_per_gpu: 8
trainer: {total_training_steps: 1}
"""


class EngineConstructed(BaseException):
    """Not an Exception: nothing on the way out may take it for bad input."""


def row(text: str = "t3 t4 t5", ground_truth: Any = "7") -> dict[str, Any]:
    return {
        "data_source": "test",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
    }


def write_rows(path: str, rows: list[dict[str, Any]]) -> None:
    Path(path).write_text("".join(json.dumps(entry) + "\n" for entry in rows))


def edit_model_config(**changes: Any) -> None:
    path = Path("model/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def remove(pattern: str) -> Callable[[], object]:
    def spoil() -> None:
        for path in list(Path("model").glob(pattern)):
            path.unlink()

    return spoil


def lose_a_tensor() -> None:
    file = Path("model/model.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def hide_package(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == hidden else find_spec(name, *rest),
    )


REWARD_FAULTS = {
    "raises": (
        "def score(data_source, solution_str, ground_truth, extra_info): return 1 / 0",
        ["score", "ZeroDivisionError", "row 0"],
    ),
    "wrong signature": ("def score(answer): return 1.0", ["raised TypeError", "data_source"]),
    "no such function": (
        "def scores(**kwargs): return 1.0",
        ["rewards.py", "its functions: scores"],
    ),
}


def refuses(check: Callable[[], Any], error: type[Exception]) -> bool:
    """Whether `check` raises `error`."""
    try:
        check()
    except error:
        return True
    return False
