"""Two settings that follow a GPU's memory if the config has null: recomputation, and how many sequences vLLM decodes.

The answers depend on the run's config, the model's and the GPU's memory, so the doctor's are the trainer's. On a CPU,
and where the model's sizes or the GPU's memory are not known, they are `false` and `DEFAULT_SEQUENCES`.

A decode step of a small model takes the host as long as the GPU, whatever the number of sequences, so more sequences
take fewer steps. vLLM captures CUDA graphs of decode steps up to `MOST_SEQUENCES`, so there are not more. How much
faster it makes a rollout was not measured.
"""

from __future__ import annotations

from typing import Any

from qarl.checks.memory import estimate, recomputes
from qarl.checks.model_size import ModelSize
from qarl.config import Config

DEFAULT_SEQUENCES = 256
MOST_SEQUENCES = 512
"""vLLM's largest captured decode step, if its settings do not say otherwise."""
SMALL = 2 * 10**9
"""The most parameters of a model whose decode steps are taken to be bound by the host."""
MEAN_RESPONSE = 0.25
"""Assumed mean length of responses, as a share of `data.max_response_length`. Only responses that run into the limit
have its length."""
_STEP = 64


def recomputes_activations(
    config: Config, hf_config: Any, *, device: str, gpu_memory_bytes: int | None
) -> bool:
    """Return what `model.gradient_checkpointing` says, or if it is null, what `qarl.checks.memory.recomputes` decides.

    `hf_config`: the model's transformers config, or None if it cannot be read.
    """
    size = _size_of(hf_config)
    asked = config.model.gradient_checkpointing
    if asked is not None or size is None:
        return bool(asked)
    return recomputes(size, config, device, gpu_memory_bytes or 0)


def sequences_at_once(
    config: Config, hf_config: Any, *, device: str, gpu_memory_bytes: int | None
) -> int:
    """Return what `rollout.max_num_seqs` says. If it is null, return what the engine's cache holds at a mean length, at
    least `DEFAULT_SEQUENCES` and at most `MOST_SEQUENCES`, for small models on a GPU, else `DEFAULT_SEQUENCES`."""
    asked = config.rollout.max_num_seqs
    if asked is not None:
        return asked
    size = _size_of(hf_config)
    if size is None or device != "cuda" or not gpu_memory_bytes:
        return DEFAULT_SEQUENCES
    plan = estimate(size, config, device=device, gpu_memory_bytes=gpu_memory_bytes)
    return sequences_for(size, config, plan.kv_tokens)


def sequences_for(size: ModelSize, config: Config, kv_tokens: float) -> int:
    """Return `sequences_at_once` of a GPU whose engine has a cache of `kv_tokens` tokens, if max_num_seqs is null."""
    if size.parameters > SMALL:
        return DEFAULT_SEQUENCES
    mean = config.data.max_prompt_length + MEAN_RESPONSE * config.data.max_response_length
    fits = int(kv_tokens / mean) // _STEP * _STEP
    most = min(fits, MOST_SEQUENCES, config.rollout.max_num_batched_tokens or MOST_SEQUENCES)
    return max(most, DEFAULT_SEQUENCES)


def _size_of(hf_config: Any) -> ModelSize | None:
    """Return the model's sizes, or None if its config has not those that the memory plan needs."""
    try:
        return None if hf_config is None else ModelSize.from_config(hf_config)
    except KeyError:
        return None
