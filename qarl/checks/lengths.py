"""Checks whether prompt and response together fit into the model's positions and into vLLM's KV cache."""

from __future__ import annotations

import math
from typing import Any

from qarl.checks.memory import readable
from qarl.checks.memory_terms import GIB
from qarl.checks.model_size import ModelSize
from qarl.config import Config
from qarl.errors import UserError
from qarl.process import runs_on_cpu

KV_BLOCK = 128
"""Number of tokens per block of vLLM's KV cache on CPUs (vllm/platforms/cpu.py)."""


def check_kv_cache(config: Config, hf_config: Any) -> None:
    """Raise UserError if vLLM's KV cache on a CPU is too small for one sequence of full length.

    vLLM would not start, and its error would name gpu_memory_utilization, which has no effect on a CPU.
    """
    if not runs_on_cpu(config.backend):
        return
    try:
        size = ModelSize.from_config(hf_config)
    except KeyError:  # the sizes of this architecture are unknown, so vLLM decides
        return
    length = config.data.max_prompt_length + config.data.max_response_length
    blocks = -(-length // KV_BLOCK) + 1
    needed = blocks * KV_BLOCK * size.kv_bytes_per_token()
    given = config.rollout.cpu_kvcache_space_gib
    if int(given * GIB) < needed:
        raise UserError(
            f"rollout.cpu_kvcache_space_gib={given:g} is too small for one sequence of {length} tokens",
            where="rollout.cpu_kvcache_space_gib",
            why=f"max_prompt_length + max_response_length need {readable(needed)} of vLLM's KV cache: {blocks} blocks "
            f"of {KV_BLOCK} tokens, including one that vLLM keeps free",
            fix=f"set it to at least {math.ceil(needed / GIB * 1000) / 1000:g} for each sequence that vLLM should "
            "decode at the same time",
        )


def check_length(config: Config, hf_config: Any) -> None:
    """Raise UserError if prompt and response together exceed the model's positions."""
    wanted = config.data.max_prompt_length + config.data.max_response_length
    limit = getattr(hf_config, "max_position_embeddings", None)
    if limit is not None and wanted > limit:
        raise UserError(
            f"max_prompt_length + max_response_length = {wanted} tokens, but the model has {limit} positions",
            where="data.max_prompt_length, data.max_response_length",
            fix=f"lower them to at most {limit} together",
        )
