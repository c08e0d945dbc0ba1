"""A model without storage from its config, for names and shapes; and torch's default dtype kept while models are made.

transformers and vLLM make models under another default dtype. vLLM does not put it back if that fails, and every
FP32 tensor made afterwards would be BF16.
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
    """torch's default dtype is afterwards what it was, also after an exception."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def meta_model(hf_config: Any, *, trust_remote_code: bool = False) -> nn.Module:
    """The causal language model that `hf_config` describes, in BF16 on the meta device.

    Raises ValueError if there is no class for it; whatever the class raises comes out as it is.
    """
    from transformers import AutoModelForCausalLM

    with default_dtype_kept(), torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            copy.deepcopy(hf_config), dtype=torch.bfloat16, trust_remote_code=trust_remote_code
        )
    return model
