"""Checkpoints on disk: a compressed-tensors folder that vLLM and transformers load as they are.

The low-bit tensors are written as they were published, not quantized again. A folder appears whole or not at all: it is
written beside its final place and renamed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from qarl.quant.scheme import Scheme


def save_compressed(
    folder: Path,
    model: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    scheme: Scheme,
    ignore: Sequence[str],
    tokenizer: Any,
) -> Path:
    """Write `tensors` (checkpoint names) with `model`'s config and `tokenizer` to `folder`, replacing what is there."""
    partial = folder.with_name(folder.name + f".partial-{os.getpid()}")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    config: Any = model.config
    config.save_pretrained(partial)
    if scheme.quantized:
        _add_quantization_config(partial / "config.json", scheme.quantization_config(list(ignore)))
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    save_file(state, partial / "model.safetensors", metadata={"format": "pt"})
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return folder


def _add_quantization_config(path: Path, quantization_config: dict[str, Any]) -> None:
    import json

    config = json.loads(path.read_text())
    config["quantization_config"] = quantization_config
    path.write_text(json.dumps(config, indent=2) + "\n")
