"""Shared by both tables of test_config_reach*.py: rows, the run that they change, what is looked at in an actor."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cpu_features import needs_w4a16_cpu
from random_models import save_random_model

from qarl.config import describe_keys
from qarl.config.schema import default_values, flat_values, sections
from qarl.config.unread import unread

BASE = """
name: reach
seed: 3
model: {path: model}
data: {train_files: train.parquet, val_files: val.parquet, train_batch_size: 4, max_prompt_length: 6,
       max_response_length: 8}
reward: {function: "rewards.py:small_numbers"}
rollout: {n: 2}
quant: {scheme: bf16, align: linears}
actor: {ppo_mini_batch_size: 2, ppo_micro_batch_size_per_gpu: 2, log_prob_micro_batch_size_per_gpu: 4}
optim: {lr: 1.0e-2, weight_decay: 0.0}
trainer: {total_training_steps: 1, val_before_train: false, logger: [], plots: false, save_final: false}
"""

REWARDS = """
import time

def small_numbers(data_source, solution_str, ground_truth, extra_info=None):
    words = solution_str.split()
    return sum(int(word[1:]) < 20 for word in words) / (len(words) + 1)

def length(data_source, solution_str, ground_truth, extra_info=None):
    return float(10 + len(solution_str.split()))

def slow(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.1)
    return 0.5
"""

OWN_CODE = """
from pathlib import Path
from transformers import Qwen3Config
Path("own_code_ran").touch()

class OwnConfig(Qwen3Config):
    pass
"""


def leaves() -> set[str]:
    """The keys of the config that hold values."""
    keys = describe_keys()
    return {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}


def make_files(folder: Path) -> None:
    """Models, prompts of 2 to 4 tokens and rewards, named as the rows name them. The tokenizer splits t1x and t2x."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    for name, family in (("model", "qwen3"), ("llama", "llama"), ("moe", "qwen3_moe")):
        save_random_model(folder / name, family)
    (folder / "rewards.py").write_text(REWARDS)
    shutil.copytree(folder / "model", folder / "own_code")
    (folder / "own_code" / "own.py").write_text(OWN_CODE)
    hf_config = json.loads((folder / "model" / "config.json").read_text())
    hf_config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "own_code" / "config.json").write_text(json.dumps(hf_config))
    for name, first, rows in (("train", 3, 7), ("other", 33, 7), ("val", 43, 3), ("other_val", 53, 3)):
        content = [
            {
                "data_source": "random",
                "prompt": [{"role": "user", "content": " ".join([f"t{first + row}"] * (2 + row % 3))}],
                "question": [{"role": "user", "content": f"t{first + row} t63"}],
                "reward_model": {"ground_truth": "7"},
            }
            for row in range(rows)
        ]
        pq.write_table(pa.Table.from_pylist(content), folder / f"{name}.parquet")


def merged(**changes: Any) -> dict[str, Any]:
    """`BASE` with dotted keys changed, without keys that another key switches off."""
    values: dict[str, Any] = yaml.safe_load(BASE)
    for dotted, value in changes.items():
        *parents, leaf = dotted.split(".")
        node = values
        for section in parents:
            node = node.setdefault(section, {})
        node[leaf] = value
    filled = {section: {} for section in sections()} | values
    for dotted, _ in unread(flat_values(filled, set()), default_values()):
        section, _, leaf = dotted.partition(".")
        del values[section][leaf]
    return values


Observe = Callable[[Any], Any]


@dataclass(frozen=True)
class Row:
    """`value` of the key, on top of `given`; `expected`: what is observed before and after, or a function of both.
    `also`: keys that have to change with it.

    `stub`: attributes of the stand-in for vLLM. `first`: keys of an interrupted run that was there before.
    """

    value: Any
    observe: Observe
    expected: tuple[Any, Any] | Callable[[Any, Any], bool]
    given: dict[str, Any] = field(default_factory=dict)
    stub: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] | None = None
    also: dict[str, Any] = field(default_factory=dict)

    def check(self, before: Any, after: Any) -> None:
        if isinstance(self.expected, tuple):
            assert self.expected[0] != self.expected[1], "a row must expect a change"
            assert (before, after) == self.expected, (before, after)
        else:
            assert self.expected(before, after), (before, after)


@dataclass(frozen=True)
class Refused:
    """The backend has no use for another value of the key, and the config says so."""

    value: Any
    why: str
    given: dict[str, Any] = field(default_factory=dict)


Table = dict[str, Row | Refused | list[Row] | list[Row | Refused]]


def written(table: Table) -> list[Any]:
    """The rows as parameters of a test, each with its key; those with W4A16 products need a CPU that has them."""
    rows = [(key, row) for key, found in table.items() for row in (found if isinstance(found, list) else [found])]
    return [
        pytest.param(key, row, id=f"{key}-{i}", marks=needs_w4a16_cpu if "w4a16" in repr(row) else ())
        for i, (key, row) in enumerate(rows)
    ]


class Notes:
    """Records of an actor."""

    def __init__(self) -> None:
        self.phase = ""
        self.forwards: dict[str, list[int]] = {"old_log_prob": [], "update": []}
        """Rows of each forward of the first decoder layer, those of a recomputation too."""
        self.batch_sizes: set[int] = set()
        """Size of the first dimension of these forwards' inputs: 1 if rows are packed."""
        self.norms: list[float] = []
        """Norm of the gradient that the optimizer gets."""
        self.masters: list[dict[str, torch.Tensor]] = []
        """FP32, the weights that the optimizer updates: at first and after each update."""

    def forward(self, module: Any, inputs: Any, given: dict[str, Any]) -> None:
        """A hook. A packed forward has one row of several, each with a position 0."""
        if self.phase:
            self.batch_sizes.add(len(inputs[0]))
            positions = given["position_ids"]
            packed = len(inputs[0]) == 1
            self.forwards[self.phase].append(int((positions == 0).sum()) if packed else len(inputs[0]))

    @property
    def moves(self) -> list[dict[str, torch.Tensor]]:
        """How far each update moved each weight."""
        pairs = zip(self.masters, self.masters[1:], strict=False)
        return [{name: after[name] - before[name] for name in after} for before, after in pairs]


def each(*observe: Observe) -> Observe:
    return lambda run: [one(run) for one in observe]


def updates(run: Any) -> int:
    return len(run.notes.norms)


def forwards(phase: str) -> Observe:
    return lambda run: run.notes.forwards[phase]


def lr_of_updates(run: Any) -> list[float]:
    """The largest move of a weight in each update over 1e-2: the learning rate's factor, where moves are signs."""
    return [max(float(move.abs().max()) for move in moves.values()) / 1e-2 for moves in run.notes.moves]


def moved(update: int) -> Observe:
    return lambda run: run.notes.moves[update][MATRIX]


def before_update(run: Any) -> torch.Tensor:
    return run.notes.masters[0][MATRIX]


def spectral_norm(move: torch.Tensor) -> float:
    """Spectral norm, in units of the learning rate: about 1 is what Muon makes."""
    return float(torch.linalg.svdvals(move)[0]) / 1e-2


def adopts(before: list[float], after: list[float], *expected: list[float]) -> bool:
    return before == pytest.approx(expected[0], rel=1e-3) and after == pytest.approx(expected[1], rel=1e-3)


def all_differ(before: list[Any], after: list[Any]) -> bool:
    return all(one != other for one, other in zip(before, after, strict=True))


def tensors_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-6)


def remembers(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    """The first moves are the same, the second are not: a decay rate works on what was there before."""
    first, second = (float((a - b).norm() / b.norm()) for b, a in zip(before, after, strict=True))
    return first < 1e-3 and second > 0.05


def cosine(steps: int, floor: float) -> list[float]:
    return [floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]


MATRIX = "model.layers.0.self_attn.q_proj.weight"
STEPS = "trainer.total_training_steps"
SIGN = {"optim.betas": [0.0, 0.0], "optim.eps": 1e-30}
"""AdamW moves each weight by the learning rate, whatever the gradient's size."""
MUON = {"optim.name": "muon", "optim.muon_lr": 1e-2, "optim.lr": 0.0}
W4A16 = {"quant.scheme": "w4a16", "quant.group_size": 32, "quant.align": "model"}
NAMES = ("seq_clip_ratio_high", "seq_clip_ratio_low", "neg_seq_clip_ratio_high", "neg_seq_clip_ratio_low")
OPEN = {f"actor.{name}": 1e6 if name.endswith("high") else 1.0 for name in NAMES} | {"actor.ppo_epochs": 2}
EVALUATED = {"trainer.val_before_train": True}
RESUMED = {STEPS: 3, "trainer.save_freq": 1}
RESUME_PATH = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "runs/reach/checkpoints/step_2"}
