"""Cut published tensors for tensor parallelism. Each worker of an engine gets whole tensors and writes only its part.

The parts are those of vLLM's own weight loaders (vllm 0.29.0: model_executor/layers/linear.py,
vocab_parallel_embedding.py, fused_moe/routed_experts.py):

    column-parallel    the worker's share of the output channels, for weight, scale and bias
    q/k/v              the same, but in whole heads. If there are fewer key-value heads than workers, workers share them
    row-parallel       the worker's share of the inputs, for weights and scales of groups. Scales per output channel
                       and biases are not cut
    vocabulary         the worker's rows, without vLLM's padding
    experts            gate and up are column-parallel, down is row-parallel; every worker has a part of each expert
    replicated         the whole tensor

Only the vLLM classes in `_CUTS` and experts are supported, not their subclasses, which may cut differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from qarl.errors import UserError
from qarl.rollout.publish.expert_writers import Part, holds_experts

Cut = Callable[[nn.Module, list[Part]], list[Part]]
"""A function of a module and the whole tensors of its checkpoint modules. It returns the worker's part of these."""


def cut_of(module: nn.Module, parts: int) -> Cut | None:
    """Return the function that cuts tensors for `module`, or None if the module's class is not supported.

    `parts`: number of checkpoint modules in `module`, which is more than 1 if vLLM fuses them."""
    if holds_experts(module):
        return None if _parallel_of_experts(module).use_ep else _cut_experts
    if getattr(module, "tp_size", 1) == 1 or any(kind.__name__ == "ReplicatedLinear" for kind in type(module).__mro__):
        return _whole
    cut = _CUTS.get(type(module).__name__)
    if cut in (_cut_columns, _cut_heads) and parts != len(getattr(module, "output_partition_sizes", ())):
        return None  # the checkpoint has one fused matrix, and equal cuts would mix its layers
    return cut


def _whole(module: nn.Module, parts: list[Part]) -> list[Part]:
    return parts


def _cut_columns(module: nn.Module, parts: list[Part]) -> list[Part]:
    layer: Any = module
    sizes = layer.output_partition_sizes
    return [_rows(part, layer.tp_rank, size) for part, size in zip(parts, sizes, strict=True)]


def _cut_heads(module: nn.Module, parts: list[Part]) -> list[Part]:
    layer: Any = module
    ranks = (layer.tp_rank, *[layer.tp_rank // layer.num_kv_head_replicas] * 2)
    cuts = zip(parts, ranks, layer.output_partition_sizes, strict=True)
    return [_rows(part, rank, size) for part, rank, size in cuts]


def _cut_inputs(module: nn.Module, parts: list[Part]) -> list[Part]:
    layer: Any = module
    return [_columns(part, layer.tp_rank, layer.tp_size) for part in parts]


def _cut_vocabulary(module: nn.Module, parts: list[Part]) -> list[Part]:
    layer: Any = module
    rows = slice(layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index)
    return [{name: tensor[rows] for name, tensor in part.items()} for part in parts]


def _cut_experts(module: nn.Module, parts: list[Part]) -> list[Part]:
    """`parts`: the stack of gate and up, [E, 2I, ...], and that of down, [E, H, ...]."""
    parallel = _parallel_of_experts(module)
    rank, size = parallel.tp_rank, parallel.tp_size
    if size == 1:
        return parts
    gate_up, down = parts
    halves = {name: tensor.unflatten(1, (2, size, -1))[:, :, rank] for name, tensor in gate_up.items()}
    return [{name: half.flatten(1, 2) for name, half in halves.items()}, _columns(down, rank, size)]


_CUTS: dict[str, Cut] = {
    "ColumnParallelLinear": _cut_columns,
    "MergedColumnParallelLinear": _cut_columns,
    "QKVParallelLinear": _cut_heads,
    "RowParallelLinear": _cut_inputs,
    "VocabParallelEmbedding": _cut_vocabulary,
    "ParallelLMHead": _cut_vocabulary,
}


def _parallel_of_experts(module: nn.Module) -> Any:
    layer: Any = module
    return layer.moe_config.moe_parallel_config


def _rows(part: Part, rank: int, size: int) -> Part:
    """Return the `size` output channels of worker `rank` from each tensor."""
    return {
        name: tensor if name == "weight_shape" else tensor[rank * size : (rank + 1) * size]
        for name, tensor in part.items()
    }


def _columns(part: Part, rank: int, count: int) -> Part:
    """Return share `rank` of `count` equal shares of the inputs.

    Raises:
        UserError: the cut would be inside a group of weights that share one scale.
    """
    split = {"weight", "weight_packed"} | ({"weight_scale"} if "weight_packed" in part else set())
    found = dict(part)
    for name in split & part.keys():
        tensor = part[name]
        if tensor.shape[-1] % count:
            raise UserError(
                f"{tensor.shape[-1]} {'groups' if name == 'weight_scale' else 'columns'} of a weight cannot be split "
                f"over {count} workers",
                where=f"rollout.tensor_model_parallel_size={count}",
                why="a worker needs whole groups, because the weights of a group share one scale",
                fix="lower rollout.tensor_model_parallel_size or quant.group_size",
            )
        size = tensor.shape[-1] // count
        found[name] = tensor[..., rank * size : (rank + 1) * size].contiguous()
    return found
