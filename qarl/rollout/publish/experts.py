"""Experts in the engine's model: where their tensors belong, and how they are written on a CPU.

A checkpoint has three matrices per expert, `mlp.experts.M.gate_proj` and so on. vLLM stacks all experts of a layer in
one module, `mlp.experts.routed_experts`. For each expert, `w13_*` contains gate_proj above up_proj, and `w2_*` contains
down_proj.

The tensors `weight_shape` of experts are checked, but not passed to vLLM. `w13` would get two of them, one from
gate_proj and one from up_proj, and vLLM's layerwise reload would count the second as an additional weight.

On a CPU, experts are written by the functions of this module. They require QaRL's plugin for vLLM
(`qarl.rollout.vllm_plugin`). On other devices, vLLM's layerwise reload writes experts.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import nn

from qarl.errors import UserError
from qarl.rollout.vllm_plugin import not_loaded

Part = dict[str, torch.Tensor]
MATRICES = {"gate_proj": "w13", "up_proj": "w13", "down_proj": "w2"}
"""Each matrix of an expert -> vLLM's stack that contains it. `write_low_bit` and `write_bf16` rely on this order."""
_STACKED = ".routed_experts"
_OWNER = re.compile(rf"(.*)[.](\d+)[.]({'|'.join(MATRICES)})")


def place_of(owner: str, modules: Container[str]) -> str | None:
    """Return the engine's module for the checkpoint module `owner`, or None if `owner` is not an expert's matrix."""
    match = _OWNER.fullmatch(owner)
    place = f"{match[1]}{_STACKED}" if match else None
    return place if place in modules else None


def place_in_layer(owner: str) -> tuple[int, int]:
    """Return a sort key for a layer's expert matrices: expert number, then the order of `MATRICES`."""
    match = _OWNER.fullmatch(owner)
    assert match is not None, owner
    return int(match[2]), list(MATRICES).index(match[3])


def stored_as(owner: str, leaf: str) -> str:
    """Return vLLM's name for the tensor `leaf` of the expert matrix `owner`, for example `w13_weight_scale`."""
    return f"{MATRICES[owner.rpartition('.')[2]]}_{leaf}"


def holds_experts(module: nn.Module) -> bool:
    """Return whether `module` is a RoutedExperts of vLLM."""
    return any(kind.__name__ == "RoutedExperts" for kind in type(module).__mro__)


def matrices_of(name: str, module: nn.Module) -> list[str]:
    """Return the names of the checkpoint modules that the RoutedExperts module `name` contains."""
    layer: Any = module
    parent = name.removesuffix(_STACKED)
    return [f"{parent}.{expert}.{matrix}" for expert in range(layer.global_num_experts) for matrix in MATRICES]


def quantized_experts(model: nn.Module) -> set[str]:
    """Return the names of the expert matrices that the engine has quantized."""
    found: set[str] = set()
    for name, module in model.named_modules():
        if holds_experts(module) and not _is_a(module, "UnquantizedFusedMoEMethod"):
            found.update(matrices_of(name, module))
    return found


def check_all_there(name: str, module: nn.Module, owners: Iterable[str]) -> None:
    """Raise UserError if the published experts of a layer (`owners`) are not those of the engine (`module`)."""
    ours, theirs = set(owners), set(matrices_of(name, module))
    if ours != theirs:
        raise UserError(
            f"the trainer and the engine have different experts in {name}",
            where=f"only the engine: {sorted(theirs - ours)[:4]}; only the trainer: {sorted(ours - theirs)[:4]}",
            why="experts that are not written would keep the random numbers that the engine starts with",
            fix="use a different model, and report this one: QaRL cannot publish to its family yet",
        )


def writer_of(module: nn.Module, direct: bool) -> Any:
    """Return the function that writes the experts of `module`, or None if vLLM's layerwise reload writes them. Raise
    UserError if the plugin is required but not loaded."""
    method = next((name for name in _WRITERS if _is_a(module, name)), None)
    if method is None:
        raise not_loaded()
    return _WRITERS[method] if direct else None


def _is_a(module: nn.Module, method: str) -> bool:
    """Return whether the class of `module.quant_method`, or one of its base classes, is named `method`. Names are
    compared, because vLLM's modules are slow to import and may not be installed."""
    return any(kind.__name__ == method for kind in type(getattr(module, "quant_method", None)).__mro__)


def write_low_bit(module: nn.Module, parts: list[Part]) -> None:
    """Pass the published tensors of all expert matrices of a layer to the layer's kernel."""
    layer: Any = module
    layer.quant_method.write(layer, *_stacked(parts))


def write_bf16(module: nn.Module, parts: list[Part]) -> None:
    """Write BF16 weights, and let vLLM's own code pack them, as when the engine starts."""
    layer: Any = module
    for stack, tensors in zip(("w13", "w2"), _stacked(parts), strict=True):
        getattr(layer, f"{stack}_weight").data = tensors["weight"]
    layer.quant_method.process_weights_after_loading(layer)


_WRITERS = {"LowBitExpertsMethod": write_low_bit, "RepairedUnquantizedMethod": write_bf16}


def _stacked(parts: list[Part]) -> tuple[Part, Part]:
    """Stack the matrices of all experts: return gate_up [E, 2I, ...] and down [E, H, ...]."""
    gates, ups, downs = parts[0::3], parts[1::3], parts[2::3]
    names = [name for name in gates[0] if name != "weight_shape"]
    both = list(zip(gates, ups, strict=True))
    return (
        {name: torch.stack([torch.cat((gate[name], up[name])) for gate, up in both]) for name in names},
        {name: torch.stack([down[name] for down in downs]) for name in names},
    )
