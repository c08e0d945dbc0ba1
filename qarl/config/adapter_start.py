"""The settings of an adapter of peft's that a run begins from: its adapter_config.json, as keys of the section `lora`.

vLLM multiplies by alpha / r, which must be a power of two (`qarl.lora.layers`). rsLoRA has alpha / sqrt(r) instead. A
factor that is a power of two stays, as the alpha that gives it. Any other one is multiplied into B, as vLLM does it
with every factor when it loads an adapter (`LoRALayerWeights.optimize`). All other settings that change what an adapter
computes are refused by name. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

CONFIG_FILE = "adapter_config.json"
"""peft's name for the file of an adapter's settings."""
_PLAIN = "QaRL and vLLM add the product of A and B, times one factor, to the output of a linear"
_CHANGED_BASE = "it was made on a base whose weights peft has changed, and which no file has"
_WITHOUT_FOLDER = (
    "a run that has a checkpoint resumes without it: config=RUN/config.yaml lora.path=null"
)
_KEPT_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is."""
_WITHOUT_EFFECT = frozenset(
    [
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "r",
        "target_modules",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "init_lora_weights",
        "megatron_core",
        "qalora_group_size",
        "eva_config",
        "ensure_weight_tying",
    ]
)
"""Keys of peft's LoraConfig that are read elsewhere, or that decide nothing once an adapter is trained."""
_REASONS = {
    "bias": "the engine adds no trained bias",
    "use_dora": "vLLM does not serve DoRA",
    "modules_to_save": "modules that were trained whole would be left out",
    "rank_pattern": "all adapters have one rank here",
    "alpha_pattern": "all adapters have one alpha here",
    "layers_to_transform": "target_modules must say which linears have an adapter",
    "exclude_modules": "target_modules must say which linears have an adapter",
    "target_parameters": "vLLM's kernels for low-bit experts take no adapters",
}


@dataclass(frozen=True)
class AdapterStart:
    """Settings of an adapter in a folder, as the section `lora` has them.

    folded    what B is multiplied by as it is loaded: 1, or a factor that is no power of two
    base      the name of the base model that the adapter was trained on, or "" if it does not say
    """

    r: int
    alpha: int
    targets: tuple[str, ...]
    folded: float
    base: str


def start_of(path: str) -> AdapterStart:
    """Return the settings of the adapter in the folder `path`. Raise pydantic's error if there is none, or if it
    computes more than A and B."""
    config = _read(path)
    for why in _refused(config):
        raise _bad(why, "begin from an adapter without it, or train new ones (remove lora.path)")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not alpha > 0:
        raise _bad(f"{CONFIG_FILE} has r={rank!r} and lora_alpha={alpha!r}", "give a whole adapter")
    factor = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    whole = math.frexp(factor)[0] == 0.5 and (factor * rank).is_integer()
    targets = config.get("target_modules")
    names = [targets] if isinstance(targets, str) else sorted(targets or ())
    if not names or not all(isinstance(name, str) and name for name in names):
        raise _bad(f"{CONFIG_FILE} has target_modules={targets!r}", "give a whole adapter")
    return AdapterStart(
        r=rank,
        alpha=int(factor * rank) if whole else rank,
        targets=tuple(names),
        folded=1.0 if whole else factor,
        base=str(config.get("base_model_name_or_path") or ""),
    )


def _read(path: str) -> Mapping[str, Any]:
    folder = Path(path)
    file = folder / CONFIG_FILE
    fix = (
        "give a folder that peft's save_pretrained has written, or the folder adapter/ of an export"
    )
    if not folder.is_dir():
        raise _bad(f"there is no folder {path}", f"{fix}; {_WITHOUT_FOLDER}")
    if not file.is_file():
        inner = next(iter(sorted(folder.glob(f"*/{CONFIG_FILE}"))), None)
        fix = f"write lora.path={inner.parent}" if inner is not None else fix
        raise _bad(f"the folder {path} has no {CONFIG_FILE}", fix)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, Mapping):
            raise ValueError("it is not a mapping")
    except (OSError, ValueError) as error:
        raise _bad(f"{file} cannot be read: {error}", "copy the file again") from error
    return config


def _refused(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why an adapter with this adapter_config.json is not plain LoRA."""
    kind = config.get("peft_type")
    if kind != "LORA":
        yield f"the adapter has peft_type={kind!r}: {_PLAIN}"
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        yield f"the adapter has task_type={task!r}, and a causal language model is trained"
    begun = config.get("init_lora_weights", True)
    if begun not in _KEPT_INITS:
        yield f"the adapter has init_lora_weights={begun!r}: {_CHANGED_BASE}"
    for key, value in config.items():
        if key in _WITHOUT_EFFECT or value in (None, False, "none", {}, []):
            continue
        yield f"the adapter has {key}={value!r}: {_REASONS.get(key, _PLAIN)}"


def _bad(reason: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError("adapter", "{reason}", {"reason": reason, "fix": fix})
