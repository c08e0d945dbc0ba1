"""One version of an adapter, and its folder in peft's format, which vLLM and transformers + peft load.

    adapter_config.json         rank, alpha and targets, with the keys of peft's LoraConfig
    adapter_model.safetensors   base_model.model.NAME.lora_A.weight [r, K] and .lora_B.weight [N, r], BF16

The format is written here, so that neither a run nor an export needs peft. A test compares it with peft's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from qarl.config.lora import FOLDER
from qarl.errors import UserError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
A = ".lora_A.weight"
B = ".lora_B.weight"
PLAIN: dict[str, Any] = {
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Keys of adapter_config.json that would change what an adapter computes, and the values with which they do not."""


@dataclass(frozen=True)
class Adapter:
    """`targets`: the last parts of the names of the linears with an adapter. `base`: name of the base model. `tensors`:
    A and B by peft's names, BF16."""

    r: int
    alpha: int
    targets: tuple[str, ...]
    base: str
    tensors: Mapping[str, torch.Tensor]

    @property
    def factor(self) -> float:
        """The product of A and B is multiplied by it."""
        return self.alpha / self.r

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def pairs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return (A, B) by the name of their linear. Raise KeyError if an A has no B."""
        names = [
            name.removeprefix(PREFIX).removesuffix(A) for name in self.tensors if name.endswith(A)
        ]
        return {
            name: (self.tensors[f"{PREFIX}{name}{A}"], self.tensors[f"{PREFIX}{name}{B}"])
            for name in names
        }


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter in peft's format. Raise UserError if it is more than A and B with a factor of alpha / r."""
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    if more := [
        f"{key}={config[key]!r}"
        for key, plain in PLAIN.items()
        if (config.get(key) or plain) != plain
    ]:
        raise UserError(
            f"the adapter has {', '.join(more)}",
            where=str(folder / CONFIG_FILE),
            why="QaRL computes plain LoRA: the product of A and B, times alpha / r",
            fix="use an adapter that QaRL has trained",
        )
    tensors = load_file(folder / WEIGHTS_FILE)
    names = [name for name in tensors if name.endswith(A)]
    linears = [name.removeprefix(PREFIX).removesuffix(A) for name in names]
    targets = tuple(sorted({name.rpartition(".")[2] for name in linears}))
    return Adapter(
        config["r"], config["lora_alpha"], targets, config["base_model_name_or_path"], tensors
    )


def name_base(export: Path) -> None:
    """Name the folder `export` as the base of the adapter in it, if there is one. peft loads the base that is named."""
    file = export / FOLDER / CONFIG_FILE
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8")) | {
            "base_model_name_or_path": str(export.resolve())
        }
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write `adapter` to `folder`, which exists."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": adapter.r,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.targets),
        "lora_dropout": 0.0,
        "inference_mode": True,
        **PLAIN,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    tensors = {}
    for name, tensor in adapter.tensors.items():
        tensors[name] = tensor.detach().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(
        (folder / CONFIG_FILE).stat().st_mode
    )  # safetensors lets only the owner read it
