"""A small random mixture of experts, and its weights as they go over the wire, made without the trainer's code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from random_models import save_tokenizer
from safetensors.torch import load_file, save_file

from qarl.quant.quantize import quantize
from qarl.schemes import Scheme

IGNORE = ("lm_head", "re:.*mlp[.](shared_expert_)?gate$")
EXPERTS, TOP_K, LAYERS, HIDDEN, WIDTH = 8, 2, 3, 128, 64


def save_random_moe(
    folder: Path, family: str = "qwen3_moe", *, vocab_size: int = 64, seed: int = 0, **sizes: Any
) -> Path:
    """A 3-layer random model with 8 experts, of which each token has 2, all far from equal. "qwen2_moe" has a shared
    expert beside them, behind a gate, and does not renormalise the router's weights."""
    import transformers

    of_family: dict[str, Any] = {"norm_topk_prob": True, "head_dim": 32}
    if family == "qwen2_moe":
        of_family = {"norm_topk_prob": False, "shared_expert_intermediate_size": 96}
    settings: dict[str, Any] = {
        **of_family,
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "moe_intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.08,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    torch.manual_seed(seed)
    kinds = {"qwen3_moe": transformers.Qwen3MoeConfig, "qwen2_moe": transformers.Qwen2MoeConfig}
    config = kinds[family](**{**settings, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
                parameter.normal_(0, 0.3)
            elif name.endswith("lm_head.weight"):
                parameter.normal_(0, 0.15)
            elif "norm" in name:
                parameter.uniform_(0.7, 1.3)
    model.save_pretrained(folder)
    save_tokenizer(folder, vocab_size)
    return folder


def wire_tensors(
    folder: Path, scheme: Scheme, *, noise_seed: int | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of `folder`'s checkpoint, whose names are llm-compressor's, in layer order; linears but the router
    and lm_head as `scheme` stores them. `noise_seed`: of another model, near to this one."""
    tensors = load_file(folder / "model.safetensors")
    if noise_seed is not None:
        generator = torch.Generator().manual_seed(noise_seed)
        tensors = {
            name: t + 0.1 * torch.randn(t.shape, generator=generator).bfloat16()
            for name, t in tensors.items()
        }
    wire: dict[str, torch.Tensor] = {}
    for name in sorted(tensors, key=_place):
        owner, _, leaf = name.rpartition(".")
        if scheme.quantized and leaf == "weight" and owner.endswith("_proj"):
            wire.update(quantize(tensors[name], scheme, name=name).named(owner))
        else:
            wire[name] = tensors[name]
    return wire


def near(
    tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`tensors` with every twentieth word of `others`: an update after which a delta publish is smaller."""
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in changed.items():
        tensor.view(-1)[::20] = others[name].view(-1)[::20]
    return changed


def _place(name: str) -> tuple[Any, ...]:
    """By layer, then by expert; the embedding first, the last norm and lm_head last."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if "layers" not in name:
        return (-1,) if "embed" in name else (10**6, "lm_head" in name)
    return (*numbers[:1], ".experts." in name, *numbers[1:], name)


def save_checkpoint(
    folder: Path, like: Path, scheme: Scheme, tensors: dict[str, torch.Tensor]
) -> Path:
    """`tensors` as a checkpoint that vLLM loads by itself."""
    shutil.copytree(like, folder)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    if scheme.quantized:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = scheme.quantization_config(IGNORE)
        (folder / "config.json").write_text(json.dumps(config))
    return folder
