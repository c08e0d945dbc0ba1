"""Checkpoints on disk: a compressed-tensors folder that vLLM and transformers load as they are.

The low-bit tensors are those that were published. A folder appears whole or not at all: it is
written beside its final place and renamed.
"""

from __future__ import annotations

import json
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
    replace_folder(folder, partial)
    return folder


def replace_folder(folder: Path, new: Path) -> None:
    """Rename `new` to `folder`; what was there is moved aside first and removed last."""
    old = folder.with_name(folder.name + f".old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _add_quantization_config(path: Path, quantization_config: dict[str, Any]) -> None:
    config = json.loads(path.read_text())
    config["quantization_config"] = quantization_config
    path.write_text(json.dumps(config, indent=2) + "\n")
