"""Build a model without storage from its config, to get names and shapes.

transformers and vLLM change torch's default dtype while they build a model. If the build fails, vLLM does not restore
it, and later tensors would be BF16 instead of FP32. `default_dtype_kept` restores it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Value of `model.dtype` -> dtype of the weights that are not quantized, and of the activations."""


@contextmanager
def default_dtype_kept() -> Iterator[None]:
    """Restore torch's default dtype at the end of the block, also after an exception."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def meta_model(hf_config: Any, *, trust_remote_code: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return the causal language model that `hf_config` describes, in `dtype` on the meta device.

    Raise ValueError if transformers has no class for it. Exceptions of the class itself are not caught.
    """
    from transformers import AutoModelForCausalLM

    with default_dtype_kept(), torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            copy.deepcopy(hf_config), dtype=dtype, trust_remote_code=trust_remote_code
        )
    return model
