"""Models of the GPU lock's vLLM, built and loaded as its loader does on CUDA, but in the memory of the CPU.

The operators that rearrange weights run on CUDA alone. Stand-ins are registered for the CPU under the operators' own
schemas, so vLLM's C library checks dtypes and arguments. Marlin's is vLLM's own plain PyTorch. Machete's is one-to-one
and depends on every word's place: two layers have the same bytes only if their weights were the same.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from same_bytes import same_bytes
from torch import nn

from qarl.process import configure_vllm_process
from qarl.quant.meta_model import default_dtype_kept
from qarl.rollout.kernel_request import REQUEST_KEY
from qarl.rollout.vllm_plugin import check_linears_loaded
from qarl.schemes import Scheme
from qarl.schemes.kernel_choice import KernelChoice

CPU = torch.device("cpu")


@contextmanager
def process_groups(config: Any) -> Iterator[None]:
    """vLLM's process groups, with one rank, for as long as models are built and loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        try:
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def engine_config(folder: Path, scheme: Scheme, ignore: tuple[str, ...], **arguments: Any) -> Any:
    """vLLM's config with the arguments that QaRL's engine gives on a machine with a GPU."""
    configure_vllm_process()
    from vllm.engine.arg_utils import EngineArgs

    from qarl.rollout.engine_config import EngineConfig, llm_arguments

    check_linears_loaded(arguments.get("kernels", KernelChoice.ENGINE))
    engine_arguments = llm_arguments(
        EngineConfig(str(folder), scheme, ignore, max_model_len=256, **arguments)
    )
    config = EngineArgs(**engine_arguments).create_engine_config()
    config.device_config.device = CPU
    return config


def build(config: Any, device: torch.device = CPU) -> Any:
    """vLLM's model of a config, not loaded. Only the last model of a config keeps its attention layers."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()
    config.compilation_config.static_all_moe_layers.clear()
    with (
        _kernels_of(config),
        default_dtype_kept(),
        set_default_torch_dtype(config.model_config.dtype),
        device,
    ):
        return initialize_model(config)


def _kernels_of(config: Any) -> AbstractContextManager[None]:
    """The context in which the rollout engine starts vLLM: vLLM's own kernels are disabled if QaRL's are asked for."""
    from qarl.rollout.vllm_plugin.own_linears import own_kernels_only

    return own_kernels_only() if REQUEST_KEY in config.additional_config else nullcontext()


def load(model: Any, config: Any, tensors: dict[str, torch.Tensor]) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    with default_dtype_kept(), set_default_torch_dtype(config.model_config.dtype), torch.no_grad():
        model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
        process_weights_after_loading(model, config.model_config, CPU)


def fresh(config: Any, tensors: dict[str, torch.Tensor]) -> Any:
    model = build(config)
    load(model, config, tensors)
    return model


@cache
def stand_in_operators() -> Any:
    """Register the stand-ins, for the whole process. They stay as long as the returned library."""
    library = torch.library.Library("_C", "IMPL")

    def marked(words: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        place = torch.arange(words.numel(), dtype=torch.int32).reshape(words.shape)
        return (words ^ (place * 2654435)).reshape(shape).contiguous()

    def gptq_marlin_repack(
        b_q_weight: torch.Tensor,
        perm: torch.Tensor,
        size_k: Any,
        size_n: Any,
        num_bits: int,
        is_a_8bit: bool,
    ) -> torch.Tensor:
        # not before vLLM's platform is replaced
        from vllm.model_executor.layers.quantization.utils.marlin_utils_test import (
            get_weight_perm,
            marlin_weights,
        )

        assert (
            b_q_weight.shape == (size_k // 8, size_n)
            and b_q_weight.is_contiguous()
            and b_q_weight.dtype == torch.int32
        )
        assert (
            num_bits == 4
            and not perm.numel()
            and not is_a_8bit
            and not (size_k % 16 or size_n % 64)
        )
        nibbles = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = (b_q_weight[:, None] >> nibbles[:, None] & 15).reshape(size_k, size_n)
        made: torch.Tensor = marlin_weights(
            codes, size_k, size_n, num_bits, get_weight_perm(num_bits)
        )
        return made

    def machete_prepack_b(
        b: torch.Tensor, a_type: Any, b_type: int, group_scales_type: Any
    ) -> torch.Tensor:
        assert (
            b.stride(0) == 1
            and b.dtype == torch.int32
            and a_type == group_scales_type == torch.bfloat16
        )
        return marked(b, tuple(b.shape))

    library.impl("gptq_marlin_repack", gptq_marlin_repack, "CPU")
    library.impl("machete_prepack_B", machete_prepack_b, "CPU")
    return library


NOT_SEARCHED = (ModuleType, type, str, bytes, int, float, complex, torch.dtype, torch.device)
OUTSIDE = (
    "vllm.config",
    "vllm.distributed",
    "vllm.platforms",
    "transformers",
    "torch.distributed",
    "weakref",
)


def tensors_of(model: nn.Module) -> dict[int, torch.Tensor]:
    """Every tensor with elements that is reachable from the layers of `model`, by its address: parameters, buffers, and
    whatever their quantization methods, kernels and functions hold. Found through Python's garbage collector."""
    tensors: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    stack: list[Any] = list(model.modules())
    while stack:
        value = stack.pop()
        if (
            id(value) in seen
            or isinstance(value, NOT_SEARCHED)
            or type(value).__module__.startswith(OUTSIDE)
        ):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.numel() and value.device.type != "meta":
                tensors.setdefault(value.data_ptr(), value)
        elif isinstance(value, FunctionType):  # not its globals
            stack += [value.__closure__, value.__defaults__]
        else:
            stack += gc.get_referents(value)
    return tensors


def differing(model: nn.Module, other: nn.Module) -> list[str]:
    """The parameters, buffers and tensors of other attributes in which two models differ."""
    ours, theirs = named_tensors(model), named_tensors(other)
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return [
        name
        for name, tensor in ours.items()
        if tensor.stride() != theirs[name].stride() or not same_bytes(tensor, theirs[name])
    ]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, also shared ones, and tensors that layers, methods and kernels have as attributes.

    Without `weight_shape`, which nothing reads after the load, and which a reload sets to that of another part of a
    fused layer."""
    tensors: dict[str, torch.Tensor] = {}
    for owner, module in model.named_modules():
        for members in (module._parameters, module._buffers):
            named = (
                (name, tensor)
                for name, tensor in members.items()
                if not name.endswith("weight_shape")
            )
            tensors |= {f"{owner}.{name}": tensor for name, tensor in named if tensor is not None}
        holders = {"": module, "quant_method.": getattr(module, "quant_method", None)}
        scheme = getattr(module, "scheme", None)
        holders |= {"scheme.": scheme}
        holders |= {
            f"{kernel}.": getattr(scheme, kernel, None) for kernel in ("kernel", "fp8_linear")
        }
        for prefix, holder in holders.items():
            values = getattr(holder, "__dict__", {}).items()
            tensors |= {
                f"{owner}.{prefix}{name}": value
                for name, value in values
                if isinstance(value, torch.Tensor)
            }
    return {name: tensor for name, tensor in tensors.items() if tensor.device.type != "meta"}
