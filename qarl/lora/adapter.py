"""One version of an adapter, and its folder in peft's format, which vLLM and transformers + peft load.

    adapter_config.json         rank, alpha and targets, with the keys of peft's LoraConfig
    adapter_model.safetensors   base_model.model.NAME.lora_A.weight [r, K] and .lora_B.weight [N, r], BF16

The format is written here, so that neither a run nor an export needs peft. A test compares it with peft's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from qarl.config.lora import CONFIG_FILE, FOLDER
from qarl.errors import UserError

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
    tensors: Mapping[str, Tensor]

    @property
    def factor(self) -> float:
        """The product of A and B is multiplied by it."""
        return self.alpha / self.r

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (A, B) by the name of their linear. Raise KeyError if an A has no B."""
        pairs = {}
        for name in _linears(self.tensors):
            a = self.tensors[f"{PREFIX}{name}{A}"]
            b = self.tensors[f"{PREFIX}{name}{B}"]
            pairs[name] = (a, b)
        return pairs


def _linears(tensors: Iterable[str]) -> list[str]:
    """Return the names of the linears whose A is among the names `tensors`."""
    names = [name for name in tensors if name.endswith(A)]
    return [name.removeprefix(PREFIX).removesuffix(A) for name in names]


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter in peft's format. Raise UserError if it is more than A and B with a factor of alpha / r."""
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    extensions = []
    for key, neutral in PLAIN.items():
        if (config.get(key) or neutral) != neutral:
            extensions.append(f"{key}={config[key]!r}")
    if extensions:
        raise UserError(
            f"the adapter has {', '.join(extensions)}",
            where=str(folder / CONFIG_FILE),
            why="QaRL computes plain LoRA: the product of A and B, times alpha / r",
            fix="use an adapter that QaRL has trained",
        )
    tensors = load_file(folder / WEIGHTS_FILE)
    leaves = {name.rpartition(".")[2] for name in _linears(tensors)}
    return Adapter(
        r=config["r"],
        alpha=config["lora_alpha"],
        targets=tuple(sorted(leaves)),
        base=config["base_model_name_or_path"],
        tensors=tensors,
    )


def name_base(export: Path) -> None:
    """Name the folder `export` as the base of the adapter in it, if there is one. peft loads the base that is named."""
    file = export / FOLDER / CONFIG_FILE
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = str(export.resolve())
        _write_config(file, config)


def _write_config(file: Path, config: Mapping[str, Any]) -> None:
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
    config_file = folder / CONFIG_FILE
    weights_file = folder / WEIGHTS_FILE
    _write_config(config_file, config)
    on_cpu = {name: tensor.detach().cpu() for name, tensor in adapter.tensors.items()}
    tensors = {name: tensor.contiguous() for name, tensor in on_cpu.items()}
    save_file(tensors, weights_file, metadata={"format": "pt"})
    weights_file.chmod(config_file.stat().st_mode)  # safetensors lets only the owner read it
