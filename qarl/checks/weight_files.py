"""Checks the weight files of a local model folder: their headers, and two embeddings that config.json ties.

Except for tied embeddings, `Policy.load` raises the same errors for faults that it finds while it loads the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from qarl.checkpoint.compressed_tensors import header_shapes
from qarl.checks.layers import meta_model
from qarl.errors import UserError
from qarl.quant.convert import tied_names
from qarl.quant.expert_names import unstacked_shapes


def cannot_load(path: str, why: str) -> UserError:
    return UserError(
        f"the model cannot be loaded from {path!r}",
        where="model.path",
        why=why,
        fix="give a Hugging Face folder with config.json and safetensors",
    )


def lacks_tensors(path: str, names: Sequence[str]) -> UserError:
    return UserError(
        f"the checkpoint lacks {len(names)} tensors of the model",
        where=f"{path}: {', '.join(sorted(names)[:4])}",
        why="transformers would fill them with random numbers",
        fix="give a complete checkpoint",
    )


def cannot_build(path: str, why: str) -> UserError:
    return UserError(
        f"the model in {path!r} cannot be built from its weights",
        where="model.path",
        why=why,
        fix="give config.json and weights of the same model; if memory ran out, train a smaller model",
    )


def has_weights(path: str) -> bool:
    return any(file for pattern in ("*.safetensors", "*.bin") for file in Path(path).glob(pattern))


def check_stored_tensors(path: str, hf_config: Any, *, trust_remote_code: bool = False) -> int | None:
    """Compare the stored tensors with the model that config.json describes. Return the number of compared tensors.

    If more than half of the model's tensor names are missing, compare nothing and return None. Otherwise, raise
    UserError if a tensor is missing or has a different shape.
    """
    model = meta_model(hf_config, trust_remote_code=trust_remote_code)
    tied = tied_names(model)
    expected = unstacked_shapes({name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied})
    stored = header_shapes(sorted(Path(path).glob("*.safetensors")))  # this includes files that no index lists
    common = expected.keys() & stored.keys()
    if 2 * len(common) < len(expected):
        return None
    if missing := [name for name in expected if name not in stored]:
        raise lacks_tensors(path, missing)
    if wrong := [name for name in expected if stored[name] != expected[name]]:
        name = wrong[0]
        why = f"the shapes of {len(wrong)} tensors differ from config.json: {name} is {list(stored[name])}, "
        raise cannot_build(path, f"{why}and should be {list(expected[name])}")
    return len(common)


def check_tied(path: str, hf_config: Any, *, trust_remote_code: bool = False) -> None:
    """Raise UserError if config.json ties the embeddings, but the files have an output embedding with other values.

    transformers would then train two tensors, and vLLM would use one."""
    if not getattr(hf_config, "tie_word_embeddings", False):
        return
    model: Any = meta_model(hf_config, trust_remote_code=trust_remote_code)
    embedding = model.get_input_embeddings()
    inputs = [name for name, parameter in model.named_parameters() if parameter is embedding.weight]
    names = {*inputs, *tied_names(model)}
    files = sorted(Path(path).glob("*.safetensors"))
    if len(names & header_shapes(files).keys()) < 2:
        return
    stored: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            stored |= {name: tensors.get_tensor(name).bfloat16() for name in names & set(tensors.keys())}
    first, *others = sorted(stored, key=lambda name: name not in inputs)
    for name in others:
        if not torch.equal(stored[first], stored[name]):
            raise UserError(
                f"config.json ties {name} to {first}, but the weight files have different tensors for them",
                where=f"model.path: {path}",
                why="transformers would train both, and vLLM would use one of them",
                fix=f'remove {name} from the files, or set "tie_word_embeddings": false if the family can be untied',
            )


def check_weight_files(path: str) -> None:
    """Raise UserError if a safetensors file of a local model cannot be opened."""
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"cannot read the weights in {file}",
                where="model.path",
                why=str(error).splitlines()[0],
                fix="download or write the file again; it may be cut short",
            ) from error
