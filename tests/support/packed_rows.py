"""Rows of many lengths as a batch, and a policy for them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from qarl.config.level import Level
from qarl.quant import get_scheme
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.policy import Policy

LENGTHS = [(3, 40), (9, 1), (1, 7), (30, 200), (5, 0), (12, 33), (2, 64), (4, 90)]
"""Tokens of prompt and response. PyTorch cuts attention differently from 192 tokens on; one response is empty."""


def made_batch(lengths: list[tuple[int, int]] = LENGTHS, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 64, (count,), generator=generator).tolist()

    prompts, responses = [tokens(p) for p, _ in lengths], [tokens(r) for _, r in lengths]
    log_probs = [(-4 - torch.rand(len(row), generator=generator)).tolist() for row in responses]
    rollout = RolloutBatch(prompts, responses, log_probs, ["stop"] * len(lengths), weight_version=0)
    advantages = torch.tensor([1.0, -0.5] * len(lengths))[: len(lengths)]
    return make_batch(rollout, torch.zeros(len(lengths)), advantages, pad_token_id=2)


def make_policy(folder: Path, level: str, scheme: str = "w4a16", *, packed: bool = True) -> Policy:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    return Policy(
        model, get_scheme(scheme, group_size=32), ("lm_head",), align=Level(level), packed=packed
    )
