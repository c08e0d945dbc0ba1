"""The model of one worker of an engine with several, made by vLLM in this process without the other workers.

vLLM asks its group for the worker's rank and for the number of workers; here the group tells another rank and number
than its own. Such a model loads like that worker's, but its layers' outputs are not summed with the others'.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qarl.quant.meta_model import default_dtype_kept


@contextmanager
def distributed_vllm() -> Iterator[None]:
    """vLLM's groups, of this process alone."""
    from vllm.distributed import parallel_state
    from vllm.plugins import load_general_plugins
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port

    load_general_plugins()
    address = get_distributed_init_method("127.0.0.1", get_open_port())
    parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
    try:
        yield
    finally:
        parallel_state.cleanup_dist_env_and_memory()


def worker_model(
    checkpoint: Path, rank: int, workers: int, **options: Any
) -> tuple[nn.Module, Any]:
    """The loaded model of worker `rank` and its config. `options`: more of vLLM's arguments."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    arguments = {"tensor_parallel_size": workers, "distributed_executor_backend": "mp", **options}
    config = EngineArgs(
        str(checkpoint), dtype="bfloat16", enforce_eager=True, max_model_len=64, **arguments
    ).create_engine_config()
    with set_current_vllm_config(config), default_dtype_kept():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 1)  # a mixture's has one group more
        group = parallel_state.get_tp_group()
        group.world_size, group.rank_in_group = workers, rank
        try:
            return get_model(vllm_config=config), config
        finally:
            group.world_size, group.rank_in_group = 1, 0


def multiplied(model: nn.Module) -> dict[str, torch.Tensor]:
    """The products of all layers of `model` with fixed inputs, and its plain parameters, by name. Some kernels keep
    their weights out of Python's reach, so products stand for them."""
    from qarl.kernels.cpu.vllm_experts import CpuExperts

    outputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        layer: Any = module
        method: Any = getattr(layer, "quant_method", None)
        if type(layer).__name__ == "RoutedExperts":
            experts = method.moe_kernel.fused_experts
            if getattr(experts, "prepared", None) is None:
                outputs |= {f"{name}.{leaf}": tensor for leaf, tensor in layer.named_parameters()}
                continue
            count = len(experts.prepared.gate_up.experts)
            ids = torch.arange(2 * count).reshape(count, 2).remainder(count)
            weights = torch.full(ids.shape, 0.5)
            outputs[name] = CpuExperts.forward(
                _inputs(count, layer.hidden_size), weights, ids, experts.prepared
            )
        elif hasattr(layer, "input_size"):
            inputs = getattr(layer, "input_size_per_partition", layer.input_size)
            outputs[name] = method.apply(layer, _inputs(5, inputs), layer.bias)
        elif hasattr(layer, "shard_indices"):
            rows = layer.shard_indices.num_org_elements
            outputs[name] = layer.weight[:rows]
            outputs[f"{name}: product"] = method.apply(layer, _inputs(5, layer.embedding_dim))[
                :, :rows
            ]
        elif not list(layer.children()):
            outputs |= {f"{name}.{leaf}": tensor for leaf, tensor in layer.named_parameters()}
    return {name: tensor.clone() for name, tensor in outputs.items()}


def _inputs(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
