"""TRL's GRPO on W4A16 rollouts. A TRL user changes two names: GRPOConfig and GRPOTrainer.

python examples/trl_addition.py [KEY=VALUE ...]      for example max_steps=60 quant_scheme=fp8 output_dir=runs/trl
"""

from __future__ import annotations

import sys
from typing import Any

import yaml
from datasets import load_dataset

from qarl.data.rewards import arithmetic
from qarl.trl import QaRLConfig, QaRLTrainer


def reward(completions: list[Any], reward_model: list[Any], **others: Any) -> list[float]:
    texts = [messages[0]["content"] for messages in completions]
    return [
        arithmetic("", text, row["ground_truth"])
        for text, row in zip(texts, reward_model, strict=True)
    ]


if __name__ == "__main__":
    overrides = dict(argument.split("=", 1) for argument in sys.argv[1:])
    settings = {
        "output_dir": "runs/trl_addition",
        "max_steps": 10,
        "logging_steps": 2,
        "report_to": "none",
    }
    settings |= {"per_device_train_batch_size": 48, "steps_per_generation": 2, "num_generations": 8}
    settings |= {
        "learning_rate": 1.5e-4,
        "lr_scheduler_type": "constant",
        "max_completion_length": 80,
    }
    settings |= {"quant_group_size": 32, "vllm_cpu_kvcache_space_gib": 0.25, "save_strategy": "no"}
    # Answers of about 50 tokens need wider bands than the paper's, which are for thousands of tokens.
    settings |= {
        "seq_clip_ratio_high": 0.01,
        "neg_seq_clip_ratio_low": 0.008,
        "neg_seq_clip_ratio_high": 0.015,
    }
    model = overrides.pop("model", "models/tiny-qwen3")
    args = QaRLConfig(**settings | {key: yaml.safe_load(value) for key, value in overrides.items()})
    data = load_dataset("parquet", data_files="data/column_addition/train.parquet", split="train")
    QaRLTrainer(model=model, reward_funcs=reward, args=args, train_dataset=data).train()
