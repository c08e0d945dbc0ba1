"""Write experts into the engine's storage on a GPU: one copy for each published stack.

vLLM's layerwise reload would move the layer to the meta device, load it into new memory, process it and copy it back.
For most classes this ends with the bytes that were published, because vLLM converts nothing: `UNCHANGED` names the
backends for which its `convert_to_*_kernel_format` returns the stacks as they are (the same in vLLM 0.24.0 and 0.29.0;
`test_gpu_experts.py` asks vLLM). Then vLLM's own `process_weights_after_loading` makes anew what an engine that slept
has lost, such as the strides of CutlassExpertsFp8.

All other classes, backends and layouts are reloaded: FlashInfer's backends swap gate and up, DeepGEMM's and AMD's
change numbers or scales, padded parameters have another shape.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from qarl.rollout.publish.captured import as_vllm_loads
from qarl.rollout.publish.experts import Part, by_parameter

UNCHANGED = {
    "UnquantizedFusedMoEMethod": ("unquantized_backend", ("TRITON",)),
    "CompressedTensorsW8A8Int8MoEMethod": ("int8_backend", ("TRITON",)),
    "CompressedTensorsW8A8Fp8MoEMethod": ("fp8_backend", ("TRITON", "VLLM_CUTLASS")),
}
"""Name of vLLM's class -> its attribute with the backend, and the backends that read the stacks as they are loaded."""


def writer_of(module: nn.Module, parts: list[Part], vllm_config: Any, derived: Collection[str]) -> Any:
    """Return the function that writes the experts of `module`, or None if vLLM's layerwise reload must.

    `parts`: this worker's part of the published stacks, on the meta device. `derived`: names of parameters that are
    never published."""
    method = getattr(module, "quant_method", None)
    attribute, backends = UNCHANGED.get(type(method).__name__, ("", ()))
    backend = getattr(getattr(method, attribute, None), "name", None)
    if backend not in backends or torch.version.hip is not None:
        return None
    stored = dict(module.named_parameters(recurse=False))
    names = {name for name, parameter in stored.items() if parameter.numel() and name not in derived}
    published = by_parameter(parts)
    if names != published.keys() or not all(_fits(stored[name], tensor) for name, tensor in published.items()):
        return None
    return partial(_copy, vllm_config=vllm_config)


def _fits(parameter: torch.Tensor, published: torch.Tensor) -> bool:
    same = parameter.shape == published.shape and parameter.dtype == published.dtype
    return same and parameter.is_contiguous()


def _copy(module: nn.Module, parts: list[Part], vllm_config: Any) -> None:
    layer: Any = module
    for name, tensor in by_parameter(parts).items():
        getattr(layer, name).data.copy_(tensor)
    with as_vllm_loads(vllm_config, {"experts": module}):
        layer.quant_method.process_weights_after_loading(layer)
