"""How published stacks of experts are written into one of vLLM's layers, on CPUs and GPUs.

A publish has two stacks of experts per layer, `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`
(`qarl.quant.experts`). vLLM has the same stacks in one module, `mlp.experts.routed_experts`: `w13_*` [E, 2I, ...],
gate above up, and `w2_*` [E, H, ...].

On a CPU, writing experts requires QaRL's plugin for vLLM (`qarl.rollout.vllm_plugin`). On a GPU, vLLM's layerwise
reload would move the layer to the meta device, load it into new memory, process it, which for Marlin is a loop over all
experts, and copy it back. Here the stacks are written as vLLM would have stored them, by a fixed number of operations:

    unchanged   for the backends of `UNCHANGED` vLLM's `convert_to_*_kernel_format` returns the stacks as they are. Then
                its own `process_weights_after_loading` makes anew what an engine that slept has lost, such as the
                strides of CutlassExpertsFp8.
    Marlin      `qarl.kernels.int4` permutes codes and scales. The workspace, which a slept engine has lost too, is set
                to zero, as at the start.
    own         QaRL's own kernel (`quant.kernels`) prepares the stacks, and its parameters keep their addresses.

This holds for both supported releases of vLLM (tests/gpu_stack/test_publish.py, test_write_experts.py). Every other
class, backend or layout is reloaded, from whole stacks (`reload`): FlashInfer's backends swap gate and up, DeepGEMM's
and AMD's change numbers or scales, and a padded parameter has another shape.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from qarl.kernels.int4 import CODES, SCALES, to_marlin
from qarl.rollout.publish.graph_addresses import as_vllm_loads
from qarl.rollout.publish.stored_layer import StoredLayer, Writer, find_layer
from qarl.rollout.publish.tensor_parallel import Cut, Part, columns
from qarl.rollout.vllm_plugin import not_loaded

STORED = {"gate_up_proj": "w13", "down_proj": "w2"}
"""Each stack of a publish -> vLLM's name for it. The functions that write a layer rely on this order."""
_EXPERTS = ".routed_experts"


def module_of(owner: str, modules: Container[str]) -> str | None:
    """Return the engine's module for the published stack `owner`, or None if `owner` is not a stack of experts."""
    parent, _, stack = owner.rpartition(".")
    module = f"{parent}{_EXPERTS}"
    return module if stack in STORED and module in modules else None


def stack_number(owner: str) -> int:
    """Return a sort key for a layer's stacks: the order of `STORED`."""
    return list(STORED).index(owner.rpartition(".")[2])


def stored_as(owner: str, leaf: str) -> str:
    """Return vLLM's name for the tensor `leaf` of the stack `owner`, for example `w13_weight_scale`."""
    return f"{STORED[owner.rpartition('.')[2]]}_{leaf}"


def holds_experts(module: nn.Module) -> bool:
    """Return whether `module` is a RoutedExperts of vLLM."""
    return any(kind.__name__ == "RoutedExperts" for kind in type(module).__mro__)


def cut_of_experts(module: nn.Module) -> Cut | None:
    """Return the function that cuts published stacks for this worker, or None with expert parallelism."""
    return None if _parallel_of_experts(module).use_ep else _cut_experts


def _cut_experts(module: nn.Module, parts: list[Part]) -> list[Part]:
    """`parts`: the stack of gate and up, [E, 2I, ...], and that of down, [E, H, ...]."""
    parallel = _parallel_of_experts(module)
    rank = parallel.tp_rank
    size = parallel.tp_size
    if size == 1:
        return parts
    gate_up, down = parts
    halves = {
        name: tensor.unflatten(1, (2, size, -1))[:, :, rank] for name, tensor in gate_up.items()
    }
    return [{name: half.flatten(1, 2) for name, half in halves.items()}, columns(down, rank, size)]


def _parallel_of_experts(layer: Any) -> Any:
    return layer.moe_config.moe_parallel_config


def quantized_experts(model: nn.Module) -> set[str]:
    """Return the names of the published stacks that the engine has quantized."""
    return {
        f"{name.removesuffix(_EXPERTS)}.{stack}"
        for name, module in model.named_modules()
        if holds_experts(module) and not _is_a(module, "UnquantizedFusedMoEMethod")
        for stack in STORED
    }


def stored_on_cpu(module: nn.Module) -> StoredLayer:
    """Return how the experts of `module` are stored. Raise UserError if the plugin is required but not loaded."""
    kinds = type(getattr(module, "quant_method", None)).__mro__
    layer = find_layer(kinds, _ON_CPUS)
    if layer is None:
        raise not_loaded()
    return layer


def _is_a(module: nn.Module, method: str) -> bool:
    """Return whether the class of `module.quant_method`, or one of its base classes, is named `method`. Names are
    compared, because vLLM's modules are slow to import and may not be installed."""
    return any(
        kind.__name__ == method for kind in type(getattr(module, "quant_method", None)).__mro__
    )


def write_low_bit(layer: Any, parts: list[Part]) -> None:
    """Pass the published stacks of a layer to the layer's kernel."""
    layer.quant_method.write(layer, *parts)


def write_bf16(layer: Any, parts: list[Part]) -> None:
    """Write BF16 weights, and let vLLM's own code pack them, as when the engine starts."""
    for stack, tensors in zip(STORED.values(), parts, strict=True):
        getattr(layer, f"{stack}_weight").data = tensors["weight"].clone()  # the sender's memory
    layer.quant_method.process_weights_after_loading(layer)


def reload(layer: Any, parts: list[Part], cut: list[Part] | None) -> None:
    """Load published stacks into `layer`, inside vLLM's layerwise reload, which then processes them.

    vLLM's own loader takes experts one by one, which for a large model takes longer than everything else. So if a stack
    fits its parameter, each parameter gets a loader that copies it whole. `cut`: this worker's part of `parts`, or None
    if QaRL does not know it; then, and if vLLM has padded a parameter, its own loader cuts and places each expert."""
    from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

    whole = by_parameter(cut or parts)
    for name, tensor in whole.items():
        if getattr(
            getattr(layer, name), "is_transposed", False
        ):  # as vLLM stores it before it processes it
            whole[name] = tensor.transpose(1, 2)
    if cut is None or any(
        getattr(layer, name).shape != tensor.shape for name, tensor in whole.items()
    ):
        _load_one_by_one(layer, by_parameter(parts))
        return
    for name in whole:
        getattr(layer, name).weight_loader = _copy_stack
    initialize_online_processing(layer)
    for name, tensor in whole.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor)


def by_parameter(parts: list[Part]) -> Part:
    """Return the published stacks of a layer by the names of vLLM's parameters."""
    named = zip(STORED.values(), parts, strict=True)
    return {f"{stack}_{leaf}": tensor for stack, part in named for leaf, tensor in part.items()}


def _copy_stack(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)


def _load_one_by_one(layer: Any, stacks: Part) -> None:
    """Call vLLM's loader for every matrix. "w1" is gate, "w3" up and "w2" down."""
    for name, stack in stacks.items():
        shards = {"w1": 0, "w3": 1} if name.startswith("w13") else {"w2": 0}
        for expert, tensor in enumerate(stack):
            for shard, part in shards.items():
                parameter = getattr(layer, name)
                parameter.weight_loader(
                    parameter, tensor.chunk(len(shards))[part], name, shard, expert
                )


def _read_low_bit(layer: Any, rows: list[int]) -> list[Part]:
    stacks: list[Part] = layer.quant_method.storage()
    return stacks


_ON_CPUS = (
    StoredLayer(
        write_low_bit,
        engine_classes=("LowBitExpertsMethod",),
        read=_read_low_bit,
        takes_tiles=True,
    ),
    StoredLayer(write_bf16, engine_classes=("RepairedUnquantizedMethod",)),
)


_Table = Mapping[str, tuple[str, tuple[str, ...]]]
UNCHANGED: _Table = {
    "UnquantizedFusedMoEMethod": ("unquantized_backend", ("TRITON",)),
    "CompressedTensorsW8A8Int8MoEMethod": ("int8_backend", ("TRITON",)),
    "CompressedTensorsW8A8Fp8MoEMethod": ("fp8_backend", ("TRITON", "VLLM_CUTLASS")),
}
"""Name of vLLM's class -> its attribute with the backend, and the backends that read the stacks as they are loaded."""
MARLIN: _Table = {
    "CompressedTensorsWNA16MarlinMoEMethod": ("wna16_backend", ("MARLIN",)),  # the older release
    "CompressedTensorsWNA16MoEMethod": ("wna16_backend", ("MARLIN",)),  # the newer release
}


def stored_on_gpu(
    module: nn.Module, parts: list[Part], vllm_config: Any, derived: Collection[str]
) -> StoredLayer | None:
    """Return how the experts of `module` are stored, or None if vLLM's layerwise reload must write them.

    `parts`: this worker's part of the published stacks, on the meta device. `derived`: names of parameters that are
    never published."""
    writer: Writer
    if torch.version.hip is not None:
        return None
    if _is_a(module, "OwnExpertsMethod"):
        stacks = parts
        writer = write_low_bit
    elif _reads(module, UNCHANGED):
        stacks = parts
        writer = partial(_write_unchanged, vllm_config=vllm_config)
    elif _reads(module, MARLIN) and _marlin_as_ours(module, parts):
        stacks = [in_marlins_layout(part) for part in parts]
        writer = _write_marlin
    else:
        return None
    stored = dict(module.named_parameters(recurse=False))
    names = {
        name for name, parameter in stored.items() if parameter.numel() and name not in derived
    }
    published = by_parameter(stacks)
    fits = names == published.keys() and all(
        (stored[name].shape, stored[name].dtype) == (tensor.shape, tensor.dtype)
        and stored[name].is_contiguous()
        for name, tensor in published.items()
    )
    return StoredLayer(writer) if fits else None


def _reads(module: nn.Module, table: _Table) -> bool:
    method = getattr(module, "quant_method", None)
    entries = (table[kind.__name__] for kind in type(method).__mro__ if kind.__name__ in table)
    attribute, backends = next(entries, ("", ()))
    return getattr(getattr(method, attribute, None), "name", None) in backends


def _marlin_as_ours(module: nn.Module, parts: list[Part]) -> bool:
    """Return whether vLLM converts W4A16 experts as `to_marlin`: symmetric, with BF16 activations, and both stacks with
    one scale per row or both with several. vLLM takes the sizes of down_proj for gate_up_proj."""
    method: Any = module.quant_method
    activations = [getattr(method, name, None) for name in ("input_dtype", "marlin_input_dtype")]
    whole = all(dtype is None or dtype.itemsize == 2 for dtype in activations)
    several = {part["weight_scale"].shape[2] > 1 for part in parts}
    even = all(
        not (part["weight_packed"].shape[1] % 64 or part["weight_packed"].shape[2] % 2)
        for part in parts
    )
    return method.symmetric and method.actorder is None and whole and len(several) == 1 and even


def in_marlins_layout(part: Part) -> Part:
    """Return a published stack as MarlinExperts reads it."""
    marlin = to_marlin(part)
    return {"weight_packed": marlin[CODES], "weight_scale": marlin[SCALES]}


def copy_stacks(module: Any, parts: list[Part]) -> None:
    for name, tensor in by_parameter(parts).items():
        getattr(module, name).data.copy_(tensor)


def _write_unchanged(layer: Any, parts: list[Part], vllm_config: Any) -> None:
    copy_stacks(layer, parts)
    with as_vllm_loads(vllm_config, {"experts": layer}):
        layer.quant_method.process_weights_after_loading(layer)


def _write_marlin(module: nn.Module, parts: list[Part]) -> None:
    copy_stacks(module, [in_marlins_layout(part) for part in parts])
    if (workspace := getattr(module, "workspace", None)) is not None:
        workspace.zero_()
