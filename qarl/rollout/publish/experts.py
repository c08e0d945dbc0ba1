"""Experts in the engine's model: where their tensors belong, and how they are written on a CPU.

A checkpoint has three matrices an expert, `mlp.experts.M.gate_proj` and so on. vLLM stacks those of a layer in one
module, `mlp.experts.routed_experts`: `w13_*` is gate_proj above up_proj of every expert, `w2_*` is down_proj. (Around
it is `mlp.experts`, MoERunner, which has no parameters.) `weight_shape` of experts is checked and not handed on: vLLM
registers one for two that arrive, and its layerwise reload would count the second as another weight.

Writers are for the classes of QaRL's plugin, without which vLLM on a CPU serves no low-bit experts and gets BF16 ones
wrong (`qarl.rollout.vllm_plugin`). Everywhere else experts go through vLLM's layerwise reload.
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
"""Matrices of an expert, in the order in which `write_low_bit` and `write_bf16` take them, and vLLM's stacks."""
_STACKED = ".routed_experts"
_OWNER = re.compile(rf"(.*)[.](\d+)[.]({'|'.join(MATRICES)})")


def place_of(owner: str, modules: Container[str]) -> str | None:
    """The engine's module for the checkpoint module `owner`, if that is an expert's matrix."""
    match = _OWNER.fullmatch(owner)
    place = f"{match[1]}{_STACKED}" if match else None
    return place if place in modules else None


def place_in_layer(owner: str) -> tuple[int, int]:
    """By which the matrices of a layer are sorted: the expert's number, then the order of `MATRICES`."""
    match = _OWNER.fullmatch(owner)
    assert match is not None, owner
    return int(match[2]), list(MATRICES).index(match[3])


def stored_as(owner: str, leaf: str) -> str:
    """The parameter that holds the tensor `leaf` of the expert's matrix `owner`: `w13_weight_scale`."""
    return f"{MATRICES[owner.rpartition('.')[2]]}_{leaf}"


def holds_experts(module: nn.Module) -> bool:
    """Whether this is vLLM's RoutedExperts."""
    return any(kind.__name__ == "RoutedExperts" for kind in type(module).__mro__)


def matrices_of(name: str, module: nn.Module) -> list[str]:
    """The checkpoint modules that the RoutedExperts called `name` holds."""
    layer: Any = module
    parent = name.removesuffix(_STACKED)
    return [f"{parent}.{expert}.{matrix}" for expert in range(layer.global_num_experts) for matrix in MATRICES]


def quantized_experts(model: nn.Module) -> set[str]:
    """The matrices of experts that the engine multiplies in low bits."""
    found: set[str] = set()
    for name, module in model.named_modules():
        if holds_experts(module) and not _is_a(module, "UnquantizedFusedMoEMethod"):
            found.update(matrices_of(name, module))
    return found


def check_all_there(name: str, module: nn.Module, owners: Iterable[str]) -> None:
    """UserError where a publish would hold other experts of this layer than the engine has."""
    ours, theirs = set(owners), set(matrices_of(name, module))
    if ours != theirs:
        raise UserError(
            f"{name} holds other experts than a publish would write",
            where=f"only the engine: {sorted(theirs - ours)[:4]}; only the trainer: {sorted(ours - theirs)[:4]}",
            why="the engine would multiply what is not written by the random numbers it starts with",
            fix="this model family cannot be published to yet: please report it",
        )


def writer_of(module: nn.Module, direct: bool) -> Any:
    """How experts on a CPU are written; None is layerwise reload.

    Raises:
        UserError: the engine runs without QaRL's plugin.
    """
    layer: Any = module
    method = next((name for name in _WRITERS if _is_a(module, name)), None)
    if method is None:
        raise not_loaded()
    parallel = layer.moe_config.moe_parallel_config
    return _WRITERS[method] if direct and parallel.tp_size == 1 and not parallel.use_ep else None


def _is_a(module: nn.Module, method: str) -> bool:
    """By the name of the class: vLLM's modules are slow to import, and there may be none."""
    return any(kind.__name__ == method for kind in type(getattr(module, "quant_method", None)).__mro__)


def write_low_bit(module: nn.Module, parts: list[Part]) -> None:
    """Wire tensors of all matrices of a layer, to the kernel that multiplies them."""
    layer: Any = module
    layer.quant_method.write(layer, *_stacked(parts))


def write_bf16(module: nn.Module, parts: list[Part]) -> None:
    """BF16 weights, packed by vLLM's own code as at its start."""
    layer: Any = module
    for stack, tensors in zip(("w13", "w2"), _stacked(parts), strict=True):
        getattr(layer, f"{stack}_weight").data = tensors["weight"]
    layer.quant_method.process_weights_after_loading(layer)


_WRITERS = {"LowBitExpertsMethod": write_low_bit, "RepairedUnquantizedMethod": write_bf16}


def _stacked(parts: list[Part]) -> tuple[Part, Part]:
    """gate_up [E, 2I, ...] and down [E, H, ...], from three parts an expert."""
    gates, ups, downs = parts[0::3], parts[1::3], parts[2::3]
    names = [name for name in gates[0] if name != "weight_shape"]
    both = list(zip(gates, ups, strict=True))
    return (
        {name: torch.stack([torch.cat((gate[name], up[name])) for gate, up in both]) for name in names},
        {name: torch.stack([down[name] for down in downs]) for name in names},
    )
