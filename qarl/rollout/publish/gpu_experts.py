"""Write experts into the engine's storage on a GPU: a fixed number of operations for each published stack.

vLLM's layerwise reload would move the layer to the meta device, load it into new memory, process it, which for Marlin
is a loop over all experts, and copy it back. Here the stacks are written as vLLM would have stored them:

    unchanged   for the backends of `UNCHANGED` vLLM's `convert_to_*_kernel_format` returns the stacks as they are. Then
                its own `process_weights_after_loading` makes anew what an engine that slept has lost, such as the
                strides of CutlassExpertsFp8.
    Marlin      `qarl.kernels.cuda.marlin` permutes codes and scales. The workspace, which a slept engine has lost too,
                is set to zero, as at the start.

This holds for vLLM 0.24.0 and 0.29.0 (tests/gpu_stack/test_publish.py, test_gpu_experts.py). Every other class, backend
or layout is reloaded: FlashInfer's backends swap gate and up, DeepGEMM's and AMD's change numbers or scales, and a
padded parameter has another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from qarl.kernels.cuda.marlin import CODES, SCALES, to_marlin
from qarl.rollout.publish.expert_writers import Part, by_parameter
from qarl.rollout.publish.graph_addresses import as_vllm_loads

_Table = Mapping[str, tuple[str, tuple[str, ...]]]
UNCHANGED: _Table = {
    "UnquantizedFusedMoEMethod": ("unquantized_backend", ("TRITON",)),
    "CompressedTensorsW8A8Int8MoEMethod": ("int8_backend", ("TRITON",)),
    "CompressedTensorsW8A8Fp8MoEMethod": ("fp8_backend", ("TRITON", "VLLM_CUTLASS")),
}
"""Name of vLLM's class -> its attribute with the backend, and the backends that read the stacks as they are loaded."""
MARLIN: _Table = {
    "CompressedTensorsWNA16MarlinMoEMethod": ("wna16_backend", ("MARLIN",)),  # vLLM 0.24
    "CompressedTensorsWNA16MoEMethod": ("wna16_backend", ("MARLIN",)),  # vLLM 0.29
}


def writer_of(module: nn.Module, parts: list[Part], vllm_config: Any, derived: Collection[str]) -> Any:
    """Return the function that writes the experts of `module`, or None if vLLM's layerwise reload must.

    `parts`: this worker's part of the published stacks, on the meta device. `derived`: names of parameters that are
    never published."""
    writer: Callable[[nn.Module, list[Part]], None]
    if torch.version.hip is not None:
        return None
    if _reads(module, UNCHANGED):
        made, writer = parts, partial(_write_unchanged, vllm_config=vllm_config)
    elif _reads(module, MARLIN) and _marlin_as_ours(module, parts):
        made, writer = [in_marlins_layout(part) for part in parts], _write_marlin
    else:
        return None
    stored = dict(module.named_parameters(recurse=False))
    names = {name for name, parameter in stored.items() if parameter.numel() and name not in derived}
    published = by_parameter(made)
    fits = names == published.keys() and all(_fits(stored[name], tensor) for name, tensor in published.items())
    return writer if fits else None


def _reads(module: nn.Module, table: _Table) -> bool:
    method = getattr(module, "quant_method", None)
    attribute, backends = table.get(type(method).__name__, ("", ()))
    return getattr(getattr(method, attribute, None), "name", None) in backends


def _marlin_as_ours(module: nn.Module, parts: list[Part]) -> bool:
    """Return whether vLLM converts W4A16 experts as `to_marlin`: symmetric, with BF16 activations, and both stacks with
    one scale per row or both with several. vLLM takes the sizes of down_proj for gate_up_proj."""
    method: Any = module.quant_method
    activations = [getattr(method, name, None) for name in ("input_dtype", "marlin_input_dtype")]
    whole = all(dtype is None or dtype.itemsize == 2 for dtype in activations)
    several = {part["weight_scale"].shape[2] > 1 for part in parts}
    even = all(not (part["weight_packed"].shape[1] % 64 or part["weight_packed"].shape[2] % 2) for part in parts)
    return method.symmetric and method.actorder is None and whole and len(several) == 1 and even


def in_marlins_layout(part: Part) -> Part:
    """Return a published stack as MarlinExperts reads it."""
    made = to_marlin(part)
    return {"weight_packed": made[CODES], "weight_scale": made[SCALES]}


def _fits(parameter: torch.Tensor, published: torch.Tensor) -> bool:
    same = parameter.shape == published.shape and parameter.dtype == published.dtype
    return same and parameter.is_contiguous()


def copy_stacks(module: Any, parts: list[Part]) -> None:
    for name, tensor in by_parameter(parts).items():
        getattr(module, name).data.copy_(tensor)


def _write_unchanged(module: nn.Module, parts: list[Part], vllm_config: Any) -> None:
    layer: Any = module
    copy_stacks(module, parts)
    with as_vllm_loads(vllm_config, {"experts": module}):
        layer.quant_method.process_weights_after_loading(layer)


def _write_marlin(module: nn.Module, parts: list[Part]) -> None:
    copy_stacks(module, [in_marlins_layout(part) for part in parts])
    if (workspace := getattr(module, "workspace", None)) is not None:
        workspace.zero_()
