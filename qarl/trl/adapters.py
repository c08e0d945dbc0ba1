"""`peft_config=LoraConfig(...)` of a `QaRLTrainer`, and adapters in the checkpoints of transformers' trainer.

TRL would wrap the model in peft's modules, whose arithmetic is not the engine's. So `QaRLTrainer` does not pass
`peft_config` on to TRL. The model gets the adapters of QaRL's local backend (`qarl.lora.layers`), and TRL sees a model
most of whose parameters are frozen. What peft can do and an engine with a quantized base cannot is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from qarl.config.lora import ALL_LINEAR, CONFIG_FILE, PEFT_NAMES, REFUSED
from qarl.errors import UserError
from qarl.lora.adapter import read_adapter
from qarl.trainer.policy import Policy

_WITHOUT_EFFECT = frozenset(
    {"peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"}
)


def base_and_section(model: Any, peft_config: Any, folder: str) -> tuple[Any, dict[str, Any]]:
    """Return the base of `model`, and the section `lora` of QaRL's config. A model that peft has given an adapter is
    TRL's own way to begin from one, which is written to `folder`.

    Raise UserError if there is more than one, if `peft_config` asks for another, or for the reasons of
    `lora_section`."""
    wrapped: Mapping[str, Any] | None = getattr(model, "peft_config", None)
    if not wrapped:
        return model, lora_section(peft_config)
    names = ", ".join(wrapped)
    if peft_config is not None or len(wrapped) != 1 or not hasattr(model, "unload"):
        raise UserError(
            f"the model has adapters of peft already: {names}",
            where="model",
            why="the run begins from one adapter, and trains that",
            fix="pass a PeftModel with one adapter and no peft_config, or the base and peft_config=LoraConfig(...)",
        )
    model.save_pretrained(folder)
    # peft writes an adapter of another name into a folder of that name.
    path = folder if names == "default" else str(Path(folder) / names)
    return model.unload(), {"path": path}


def lora_section(peft_config: Any) -> dict[str, Any]:
    """Return the section `lora` of QaRL's config that `peft_config` describes: {} for None.

    Raise UserError if it is no LoraConfig, or if a field is set that QaRL does not support."""
    if peft_config is None:
        return {}
    from peft import LoraConfig, TaskType

    if type(peft_config) is not LoraConfig:
        what = f"QaRLTrainer does not support peft_config={type(peft_config).__name__}"
        why = "vLLM adds only LoRA to the outputs of its linears"
        fix = "pass a peft.LoraConfig"
        raise UserError(what, where="peft_config", why=why, fix=fix)
    if not peft_config.r:
        what = f"r={peft_config.r} gives the model no adapters"
        why = "all weights would be trained"
        raise UserError(
            what,
            where="peft_config.r",
            why=why,
            fix="set r to a rank such as 8, or leave peft_config out",
        )
    targets = peft_config.target_modules
    if not targets:
        why = "peft's own default depends on the model's family"
        fix = f'set it to "{ALL_LINEAR}", to a list such as ["q_proj", "v_proj"], or to a regular expression'
        raise UserError(
            f"target_modules={targets!r}", where="peft_config.target_modules", why=why, fix=fix
        )
    supported: dict[str, Any] = {
        "r": ...,
        "lora_alpha": ...,
        "target_modules": ...,
        "task_type": TaskType.CAUSAL_LM,
    }
    defaults = LoraConfig()
    for name in (field.name for field in fields(peft_config) if field.name not in _WITHOUT_EFFECT):
        value = getattr(peft_config, name)
        if value == getattr(defaults, name) or supported.get(name) in (..., value):
            continue
        why = REFUSED.get(PEFT_NAMES.get(name, name), "trainer and engine compute plain LoRA")
        what = f"QaRLTrainer does not support {name}={value!r} of peft's LoraConfig"
        raise UserError(what, where=f"peft_config.{name}", why=why, fix=f"leave {name} out")
    names = [targets] if isinstance(targets, str) else sorted(targets)
    return {"r": peft_config.r, "alpha": peft_config.lora_alpha, "target_modules": names}


def ignore_frozen(model: torch.nn.Module) -> None:
    """Let DistributedDataParallel leave out the parameters of quantized weights, which are on the meta device."""
    frozen = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)


@torch.no_grad()
def load_adapter(policy: Policy, folder: str) -> None:
    """Load an adapter in peft's format. Raise UserError if it is missing, or belongs to other linears."""
    assert policy.adapters is not None
    if not (Path(folder) / CONFIG_FILE).is_file():
        why = "its run trained all weights"
        raise UserError(
            "the checkpoint has no adapter", where=folder, why=why, fix="leave peft_config out"
        )
    saved: Mapping[str, torch.Tensor] = read_adapter(Path(folder)).tensors
    ours = policy.adapters.tensors()
    shapes, expected = (
        {name: tensor.shape for name, tensor in each.items()} for each in (saved, ours)
    )
    if differing := sorted(name for name, _ in shapes.items() ^ expected.items()):
        why = "this tensor is only in the checkpoint, or only in the model, or has different shapes"
        fix = "restore the model and peft_config of the run"
        raise UserError(
            "the checkpoint has another adapter",
            where=f"{folder}: {differing[0]}",
            why=why,
            fix=fix,
        )
    for name, tensor in saved.items():
        ours[name].copy_(tensor)
