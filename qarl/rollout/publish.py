"""Publishing weights to the engine: check, apply, drop the prefix cache, commit the version.

The tensors travel in checkpoint format (compressed-tensors names and dtypes) through vLLM's own layerwise reload. Until
the version is committed the engine counts as stale, so an exception at any point leaves it refusing to generate.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch

from qarl.rollout.manifest import Manifest, PublishReport, check_complete, quantized_layers

if TYPE_CHECKING:
    from qarl.rollout.engine import RolloutEngine


def publish_weights(
    engine: RolloutEngine, tensors: list[tuple[str, torch.Tensor]], *, version: int
) -> PublishReport:
    """See `RolloutEngine.publish`."""
    start = time.perf_counter()
    check_complete(tensors, engine.expected)
    validated = time.perf_counter()
    engine.mark_stale(f"the publish of version {version} did not complete")
    engine.llm.apply_model(keep_int8_scales_alive)
    # vLLM keeps no reference to these tensors: its weight loaders copy them into storage of its own.
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors, "is_checkpoint_format": True})
    engine.llm.apply_model(refresh_tied_layers)
    if not engine.llm.reset_prefix_cache():
        raise RuntimeError("vLLM could not reset its prefix cache: requests are still running")
    engine.weight_version = version
    seconds = {"validate": validated - start, "apply": time.perf_counter() - validated}
    return _report(tensors, engine.expected, version, seconds)


def keep_int8_scales_alive(vllm_model: torch.nn.Module) -> None:
    """From here on every W8A8 layer on CPU holds on to the weight scales that its oneDNN handler points to.

    The handler that `process_weights_after_loading` makes stores the bare address of the scales (csrc/cpu/
    dnnl_helper.cpp). Layerwise reload then copies the new scales into the parameter it had before and frees the
    tensor at that address: the layer scales by whatever comes to lie there, mostly to NaN (vLLM 0.29 and 0.32). A
    rebuilt handler would need the int8 weights again, of which only the packed copy is left; so each kernel object
    keeps the scales itself, and a reload leaves two copies of them.
    """
    for module in vllm_model.modules():
        kernel: Any = getattr(getattr(module, "scheme", None), "kernel", None)
        if hasattr(kernel, "dnnl_handler") and not hasattr(kernel, "live_scale"):
            kernel.live_scale = module.weight_scale
            kernel.process_weights_after_loading = functools.partial(_process_and_keep_scale, kernel)


def _process_and_keep_scale(kernel: Any, layer: torch.nn.Module) -> None:
    type(kernel).process_weights_after_loading(kernel, layer)
    kernel.live_scale = layer.weight_scale


def refresh_tied_layers(vllm_model: torch.nn.Module) -> None:
    """Let layers that share one weight make their kernel's form of it again.

    On CPU vLLM packs each weight for its matrix product once, at load. Layerwise reload repeats that for layers that
    were sent weights; a tied lm_head is sent none and would go on multiplying by the old ones (seen with vLLM 0.29).
    """
    sharing: dict[int, list[torch.nn.Module]] = {}
    for module in vllm_model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.numel():
            sharing.setdefault(weight.data_ptr(), []).append(module)
    for modules in sharing.values():
        for module in modules if len(modules) > 1 else []:
            quant_method: Any = getattr(module, "quant_method", None)
            if quant_method is not None:
                quant_method.process_weights_after_loading(module)


def _report(
    tensors: list[tuple[str, torch.Tensor]], expected: Manifest, version: int, seconds: dict[str, float]
) -> PublishReport:
    layers = quantized_layers(expected)
    quantized_bytes = elements = 0
    for name, tensor in tensors:
        layer, _, leaf = name.rpartition(".")
        if layer not in layers or leaf == "bias":
            continue
        quantized_bytes += tensor.nbytes
        if leaf == "weight":
            elements += tensor.numel()
        elif leaf == "weight_shape":
            elements += int(tensor.prod())
    return PublishReport(
        version=version,
        tensors=len(tensors),
        bytes=sum(tensor.nbytes for _, tensor in tensors),
        quantized_bytes=quantized_bytes,
        quantized_bf16_bytes=2 * elements,
        seconds=seconds,
    )
