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


@contextmanager
def default_dtype_kept() -> Iterator[None]:
    """Restore torch's default dtype at the end of the block, also after an exception."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def meta_model(hf_config: Any, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the causal language model that `hf_config` describes, in BF16 on the meta device.

    Raise ValueError if transformers has no class for it. Exceptions of the class itself are not caught.
    """
    from transformers import AutoModelForCausalLM

    with default_dtype_kept(), torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            copy.deepcopy(hf_config), dtype=torch.bfloat16, trust_remote_code=trust_remote_code
        )
    return model
