"""Shared by the engine tests: a small model, prompts, and greedy generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qarl.config import Config, load_config
from qarl.quant import Scheme, get_scheme, quantize_model
from qarl.quant.convert import DEFAULT_IGNORE
from qarl.rollout.engine import RolloutEngine, SamplingConfig
from qarl.schemes.kernel_choice import KernelChoice

SCHEME = get_scheme("w4a16", group_size=32)
PROMPTS = [[3 + i % 7, 5, 8 + i % 11, 4] for i in range(16)]


def load_model(
    folder: Path,
    *,
    noise_seed: int | None = None,
    scheme: Scheme = SCHEME,
    kernels: KernelChoice = KernelChoice.ENGINE,
    ignore: tuple[str, ...] = DEFAULT_IGNORE,
) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if noise_seed is not None:
        torch.manual_seed(noise_seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    quantize_model(model, scheme=scheme, ignore=ignore, kernels=kernels)
    return model


def greedy(
    engine: RolloutEngine, max_tokens: int = 24
) -> tuple[list[list[int]], list[list[float]]]:
    batch = engine.generate(PROMPTS, SamplingConfig(max_tokens, temperature=0.0))
    return batch.response_token_ids, batch.rollout_log_probs


def config(tmp_path: Path, *overrides: str) -> Config:
    arguments = [
        "config=quickstart.yaml",
        f"output_dir={tmp_path}",
        "rollout.cpu_kvcache_space_gib=0.25",
        *overrides,
    ]
    return load_config(arguments)
