"""Give a model the engine's arithmetic for a few forwards, and then its own arithmetic back.

At `off` and `linears` rounding hides small mistakes. Where level `model` exists, the guard compares the engine with the
same weights and buffers at `model`, where healthy runs have a mismatch of 0, or nearly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qarl.align.model import align_model, model_unavailable


@contextmanager
def engine_arithmetic(model: Any, *, dtype: torch.dtype | None = None) -> Iterator[bool]:
    """Align a BF16 transformers model on a CPU to level `model`, and undo it at the end of the context.

    Yield whether level `model` exists for it. If not, nothing changes. `dtype`: dtype of the weights in the forward, if
    FSDP2 gathers another one than it shards. FSDP2 may shard the model, except experts that are not quantized."""
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or model_unavailable(model.config, "cpu", dtype or parameter.dtype):
        yield False
        return
    modules = dict(model.named_modules())
    classes = {name: type(module) for name, module in modules.items()}
    attention = model.config._attn_implementation
    try:
        yield align_model(model, "model", dtype=torch.bfloat16).limit_level == "model"
    finally:
        for name, module in modules.items():
            module.__class__ = classes[name]
            if name and model.get_submodule(name) is not module:
                model.set_submodule(name, module)
        model.set_attn_implementation(attention)
