"""One version of an adapter, and its folder in peft's format, which vLLM and transformers + peft load.

    adapter_config.json         rank, alpha and targets, with the keys of peft's LoraConfig
    adapter_model.safetensors   base_model.model.NAME.lora_A.weight [r, K] and .lora_B.weight [N, r], BF16

The format is written here, so that neither a run nor an export needs peft. A test compares it with peft's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from qarl.config.lora import CONFIG_FILE, FOLDER, chooses_by_name, engine_rank
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
    """`targets`: peft's target_modules: the last parts of the names of the linears with an adapter, or if others have
    the same last part, the whole names. `base`: name of the base model. `tensors`: A [r, K] and B [N, r] by peft's
    names, BF16."""

    r: int
    alpha: float
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

    def padded(self) -> Adapter:
        """Return the adapter with the engine's rank: A has more rows and B more columns, of zeros. The factor stays.

        A tensor of another rank than `r` is an error, which the publish finds. So it stays as it is."""
        rank = engine_rank(self.r)
        tensors = {
            name: with_rank(name, tensor, rank) if _rank_of(name, tensor) == self.r else tensor
            for name, tensor in self.tensors.items()
        }
        return replace(self, r=rank, alpha=self.factor * rank, tensors=tensors)

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (A, B) by the name of their linear. Raise KeyError if an A has no B."""
        pairs = {}
        for name in _linears(self.tensors):
            a = self.tensors[f"{PREFIX}{name}{A}"]
            b = self.tensors[f"{PREFIX}{name}{B}"]
            pairs[name] = (a, b)
        return pairs


def with_rank(name: str, tensor: Tensor, rank: int) -> Tensor:
    """Return A [r, K] or B [N, r], whose name is `name`, with zeros up to `rank`, or itself if it has that rank."""
    missing = rank - _rank_of(name, tensor)
    if not missing:
        return tensor
    return F.pad(tensor, (0, 0, 0, missing) if name.endswith(A) else (0, missing))


def _rank_of(name: str, tensor: Tensor) -> int:
    return tensor.shape[0 if name.endswith(A) else 1]


def adapted_leaves(names: Iterable[str]) -> tuple[str, ...]:
    """Return the last parts of the `names` of linears, sorted, each once."""
    return tuple(sorted({name.rpartition(".")[2] for name in names}))


def peft_targets(names: Iterable[str], targets: Sequence[str]) -> tuple[str, ...]:
    """Return what `Adapter.targets` says, sorted. `names`: those of the linears with an adapter. `targets`: a value of
    `lora.target_modules`."""
    return tuple(sorted(names)) if chooses_by_name(targets) else adapted_leaves(names)


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
    targets = config["target_modules"]
    if isinstance(targets, str):
        targets = peft_targets(_linears(tensors), [targets])
    return Adapter(
        r=config["r"],
        alpha=config["lora_alpha"],
        targets=tuple(sorted(targets)),
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
        "lora_alpha": int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha,
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
