"""Adapters that peft itself has made and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qarl.lora.adapter import WEIGHTS_FILE

TARGETS = ["q_proj", "v_proj", "down_proj"]


def save_pefts(
    base: Path, folder: Path, dtype: torch.dtype = torch.float32, *, seed: int = 1, **fields: Any
) -> Path:
    """Save an adapter with a random B as peft does it. Its tensors have `dtype`."""
    settings: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": TARGETS}
    import peft

    config = peft.LoraConfig(task_type="CAUSAL_LM", **(settings | fields))
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                random = torch.randn(parameter.shape, generator=generator) / 16
                parameter.copy_(random.bfloat16())
    model.save_pretrained(str(folder))
    file = folder / WEIGHTS_FILE
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
