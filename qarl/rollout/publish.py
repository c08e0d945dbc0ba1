"""Publishing weights to the engine: check, apply, drop the prefix cache, commit the version.

The tensors travel in checkpoint format (compressed-tensors names and dtypes) through vLLM's own layerwise reload. Until
the version is committed the engine counts as stale, so an exception at any point leaves it refusing to generate.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from qarl.rollout.manifest import Manifest, PublishReport, check_complete

if TYPE_CHECKING:
    from qarl.rollout.engine import RolloutEngine

_LOW_BIT_SUFFIXES = (".weight_packed", ".weight_scale", ".weight_shape")


def publish_weights(
    engine: RolloutEngine, tensors: list[tuple[str, torch.Tensor]], *, version: int
) -> PublishReport:
    """See `RolloutEngine.publish`."""
    start = time.perf_counter()
    check_complete(tensors, engine.expected)
    validated = time.perf_counter()
    engine.mark_stale(f"the publish of version {version} did not complete")
    # vLLM keeps no reference to these tensors: its weight loaders copy them into storage of its own.
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors, "is_checkpoint_format": True})
    engine.llm.apply_model(refresh_tied_layers)
    if not engine.llm.reset_prefix_cache():
        raise RuntimeError("vLLM could not reset its prefix cache: requests are still running")
    engine.weight_version = version
    seconds = {"validate": validated - start, "apply": time.perf_counter() - validated}
    return _report(tensors, engine.expected, version, seconds)


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
    low_bit = {name: tensor for name, tensor in tensors if name.endswith(_LOW_BIT_SUFFIXES)}
    bf16_elements = sum(
        int(tensor.prod()) for name, tensor in low_bit.items() if name.endswith(".weight_shape")
    )
    return PublishReport(
        version=version,
        tensors=len(tensors),
        bytes=sum(tensor.nbytes for _, tensor in tensors),
        quantized_bytes=sum(tensor.nbytes for tensor in low_bit.values()),
        quantized_bf16_bytes=2 * bf16_elements,
        seconds=seconds,
    )
