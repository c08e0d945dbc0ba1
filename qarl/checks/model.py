"""Whether trainer and engine make the same model of a config, decided from the config before anything is loaded.

One function for every way in: the set-up of a run, verl's launcher, the doctor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from qarl.align.config_keys import check_config_keys
from qarl.align.families import FAMILIES, check_family, shown_mismatch
from qarl.align.model import resolve_level
from qarl.checks.layers import FUSED_LAYERS, meta_model
from qarl.config import Config
from qarl.errors import UserError
from qarl.process import runs_on_cpu
from qarl.rollout import vllm_rules

_WHERE = "model.path: config.json"


def check_model(hf_config: Any) -> None:
    """Refuse a transformers config that the engine does not serve, or reads otherwise than the trainer, and a family of
    which no agreement was shown.

    Raises:
        UserError: names the family, the architecture, the layer or the key, and why.
    """
    check_served(hf_config)
    check_family(hf_config)


def check_served(hf_config: Any) -> None:
    """`check_model` for any family whose layers can be published."""
    check_architecture(hf_config)
    check_config_keys(hf_config)
    if hf_config.model_type not in FAMILIES:
        check_checkpoint_layers(meta_model(hf_config), hf_config.model_type)


def report_level(config: Config, hf_config: Any) -> None:
    """Say on stderr that a model gets a lower level than `quant.align`, and what was measured of its family."""
    device = "cpu" if runs_on_cpu(config.backend) else "cuda"
    level, reasons = resolve_level(hf_config, config.quant.align, device_type=device, kernels=set())
    shown = shown_mismatch(hf_config)
    if level != config.quant.align:
        print(f"note: quant.align={config.quant.align} falls back to {level}: {'; '.join(reasons)}", file=sys.stderr)
    if shown:
        print(f"note: {shown}", file=sys.stderr)


def check_architecture(hf_config: Any) -> None:
    """The class that vLLM picks by `architectures` must be its own, and the one that the trainer loads."""
    name = trainer_class(hf_config)
    named = list(getattr(hf_config, "architectures", None) or [])
    if named and named[0] != name:
        raise UserError(
            f"the engine would run {named[0]}, the trainer {name}",
            where=f"{_WHERE}: architectures, model_type={hf_config.model_type!r}",
            why="vLLM picks its class by architectures, transformers by model_type",
            fix=f"correct the one that is wrong; {name} belongs to model_type {hf_config.model_type!r}",
        )
    if hf_config.model_type in FAMILIES or vllm_rules.unavailable():
        return
    module = vllm_rules.serving_module(name)
    if module is None:
        raise UserError(
            f"vLLM has no class for {name}, so nothing makes the rollouts",
            where=_WHERE,
            fix=f"train a model that vLLM serves; those of {', '.join(FAMILIES)} are tested",
        )
    if module.rpartition(".")[2] == "transformers" or ".transformers." in module:
        raise UserError(
            f"{name} is served by vLLM through transformers, and is refused",
            where=_WHERE,
            why="that class names its layers in its own way, and no publish to it was shown to be right",
            fix=f"train a model that vLLM has a class for; those of {', '.join(FAMILIES)} are tested",
        )


def trainer_class(hf_config: Any) -> str:
    """Name of the class that the trainer loads.

    Raises:
        UserError: transformers has no causal language model for this config.
    """
    from transformers import AutoModelForCausalLM

    try:
        found = AutoModelForCausalLM._model_mapping[type(hf_config)]
    except KeyError:
        raise UserError(
            f"transformers has no causal language model for model_type {hf_config.model_type!r}",
            where=_WHERE,
            why="a model whose class comes with its folder is not trained, with model.trust_remote_code=true either: "
            "vLLM would run another class"
            if getattr(hf_config, "auto_map", None)
            else None,
            fix="give a causal language model that transformers and vLLM both know",
        ) from None
    chosen: Any = found[0] if isinstance(found, tuple | list) else found
    return str(chosen.__name__)


def check_checkpoint_layers(model: nn.Module, model_type: str) -> None:
    """Layers that the checkpoint itself fuses have no counterpart that could be published one by one."""
    fused = sorted({name.rpartition(".")[2] for name, _ in model.named_modules()} & set(FUSED_LAYERS))
    if fused:
        raise UserError(
            f"models of the family {model_type} are refused: their checkpoints hold {' and '.join(fused)} as one layer",
            where=_WHERE,
            why="QaRL quantizes and publishes q_proj, k_proj, v_proj, gate_proj and up_proj as checkpoints of the "
            "other families have them, and lets vLLM fuse them",
            fix=f"train a model of another family; those of {', '.join(FAMILIES)} are tested",
        )


def check_not_quantized(config: Config, hf_config: Any) -> None:
    """Training starts from high-precision masters."""
    found = getattr(hf_config, "quantization_config", None)
    if found is None:
        return
    found = found if isinstance(found, Mapping) else found.to_dict()
    raise UserError(
        f"the model in {config.model.path!r} is already quantized ({found.get('quant_method', 'unknown method')})",
        where="model.path: quantization_config in its config.json",
        why="training updates BF16 master weights and quantizes them itself; an already quantized model has none",
        fix="give the original BF16 checkpoint; quant.scheme says what it is quantized to",
    )
