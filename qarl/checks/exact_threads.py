"""The default number of threads: all cores where their number changes no bit, otherwise one. No torch is imported here.

The number must be known before torch starts its pool, so this reads the model's config.json by itself.
`qarl.checks.exactness` says what a run with another number loses.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl.config import Config
from qarl.kernels.cpu.attention_tiles import longest_exact_prompt
from qarl.process import thread_count, vllm_is_for_cpus

_LARGEST_HEAD = 256
"""The head size that is assumed for a model whose config.json is not on this machine: the larger, the more cautious."""


def run_threads(config: Config) -> int:
    """Return the number of threads of this process: `trainer.num_threads`, or OMP_NUM_THREADS, or the default."""
    count = thread_count(config.trainer.num_threads, processes=config.trainer.n_gpus_per_node)
    chosen = config.trainer.num_threads or os.environ.get("OMP_NUM_THREADS")
    if chosen or count == 1 or not config.quant.align.follows_engine or not vllm_is_for_cpus():
        return count
    longest = longest_exact_prompt(_head_size(config.model.path))
    return count if config.longest_prefill <= longest else 1


def _head_size(model: str) -> int:
    """Return the head size of a model, a folder or a name on the Hub."""
    file = Path(model) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a run refuses a broken file with its own error
        return _LARGEST_HEAD
    return _head_size_of(values) if isinstance(values, Mapping) else _LARGEST_HEAD


def _head_size_of(values: Mapping[str, Any]) -> int:
    hidden = values.get("hidden_size")
    heads = values.get("num_attention_heads")
    size = values.get("head_dim")
    if not size and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        size = hidden // heads
    return size if isinstance(size, int) and size > 0 else _LARGEST_HEAD
