"""A task of your own, from data to run: the model learns to subtract.

    python examples/own_task.py FOLDER        # FOLDER/train.jsonl, FOLDER/test.jsonl and FOLDER/subtraction.yaml
    qarl doctor config=FOLDER/subtraction.yaml
    qarl train config=FOLDER/subtraction.yaml

Run it from the repository after `make model`: the model is the quickstart's. Each row has verl's schema: `prompt`, a
list of chat messages; `data_source`; `reward_model.ground_truth`, which the reward gets; `extra_info`, for whatever
else it needs.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

TRAIN, TEST = 256, 64


def row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    """One problem: two numbers of one or two digits, the larger one first."""
    small, large = sorted((rng.randrange(100), rng.randrange(100)))
    return {
        "data_source": "subtraction",
        "prompt": [{"role": "user", "content": f"{large}-{small}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(large - small)},
        "extra_info": {"split": split, "index": index},
    }


def config(folder: Path) -> dict[str, Any]:
    """The run; keys that are not here keep their defaults (docs/config_reference.md)."""
    return {
        "name": "subtraction",
        "model": {"path": "models/tiny-qwen3"},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "val_files": [str(folder / "test.jsonl")],
            "train_batch_size": 4,  # prompts per training step
            "max_prompt_length": 32,
            "max_response_length": 32,
        },
        "reward": {"function": "arithmetic"},  # the last number of the response must be the ground truth
        "rollout": {"n": 8, "cpu_kvcache_space_gib": 0.25},
        "quant": {"scheme": "w4a16", "group_size": 32},
        "actor": {
            "ppo_mini_batch_size": 2,
            "ppo_micro_batch_size_per_gpu": 16,
            "log_prob_micro_batch_size_per_gpu": 32,
            # Short responses: wider bands than the paper's.
            "seq_clip_ratio_high": 0.02,
            "neg_seq_clip_ratio_low": 0.02,
            "neg_seq_clip_ratio_high": 0.03,
        },
        "optim": {"lr": 1.5e-4},
        "trainer": {"total_training_steps": 100, "test_freq": 25, "num_threads": 1},
    }


def main(argv: Sequence[str]) -> None:
    folder = Path(argv[0]) if argv else Path("data/subtraction")
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for split, count in (("train", TRAIN), ("test", TEST)):
        lines = [json.dumps(row(rng, split, index)) for index in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = folder / "subtraction.yaml"
    path.write_text(yaml.safe_dump(config(folder), sort_keys=False), encoding="utf-8")
    print(f"now: qarl train config={path}")


if __name__ == "__main__":
    main(sys.argv[1:])
