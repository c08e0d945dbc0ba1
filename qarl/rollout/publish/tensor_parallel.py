"""Tensor parallelism: the part of a whole published tensor that one worker of an engine writes.

The parts are those of vLLM's own weight loaders (vllm/model_executor/layers: linear.py,
vocab_parallel_embedding.py, fused_moe/routed_experts.py):

    column-parallel    the worker's share of the output channels, for weight, scale and bias
    q/k/v              the same, but in whole heads. If there are fewer key-value heads than workers, workers share them
    row-parallel       the worker's share of the inputs, for weights and scales of groups. Scales per output channel
                       and biases are not cut
    vocabulary         the worker's rows, without vLLM's padding
    experts            gate and up are column-parallel, down is row-parallel; every worker has a part of each expert
                       (`qarl.rollout.publish.experts`)
    replicated         the whole tensor

Only the vLLM classes in `_CUTS` and experts are supported, not their subclasses, which may cut differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Part = dict[str, torch.Tensor]
"""The tensors of one checkpoint module. A key is the last component of a tensor's name: `weight_packed`, `bias`, ..."""
Cut = Callable[[nn.Module, list[Part]], list[Part]]
"""A function of a module and the whole tensors of its checkpoint modules. It returns the worker's part of these."""


def cut_of_split(module: nn.Module, parts: int) -> Cut | None:
    """Return the function that cuts tensors for a dense `module` that is split over workers, or None if its class is
    not supported.

    `parts`: number of checkpoint modules in `module`, which is more than 1 if vLLM fuses them."""
    cut = _CUTS.get(type(module).__name__)
    if cut in (_cut_columns, _cut_heads) and parts != len(
        getattr(module, "output_partition_sizes", ())
    ):
        return None  # the checkpoint has one fused matrix, and equal cuts would mix its layers
    return cut


def _cut_columns(layer: Any, parts: list[Part]) -> list[Part]:
    sizes = layer.output_partition_sizes
    return [_rows(part, layer.tp_rank, size) for part, size in zip(parts, sizes, strict=True)]


def _cut_heads(layer: Any, parts: list[Part]) -> list[Part]:
    ranks = (layer.tp_rank, *[layer.tp_rank // layer.num_kv_head_replicas] * 2)
    cuts = zip(parts, ranks, layer.output_partition_sizes, strict=True)
    return [_rows(part, rank, size) for part, rank, size in cuts]


def _cut_inputs(layer: Any, parts: list[Part]) -> list[Part]:
    return [columns(part, layer.tp_rank, layer.tp_size) for part in parts]


def _cut_vocabulary(layer: Any, parts: list[Part]) -> list[Part]:
    rows = slice(layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index)
    return [{name: tensor[rows] for name, tensor in part.items()} for part in parts]


_CUTS: dict[str, Cut] = {
    "ColumnParallelLinear": _cut_columns,
    "MergedColumnParallelLinear": _cut_columns,
    "QKVParallelLinear": _cut_heads,
    "RowParallelLinear": _cut_inputs,
    "VocabParallelEmbedding": _cut_vocabulary,
    "ParallelLMHead": _cut_vocabulary,
}


def _rows(part: Part, rank: int, size: int) -> Part:
    """Return the `size` output channels of worker `rank` from each tensor."""
    return {
        name: tensor if name == "weight_shape" else tensor[rank * size : (rank + 1) * size]
        for name, tensor in part.items()
    }


def columns(part: Part, rank: int, count: int) -> Part:
    """Return share `rank` of `count` equal shares of the inputs. `qarl.checks.layers` refuses a cut inside a
    group of weights that share one scale."""
    names = {"weight", "weight_packed"} | ({"weight_scale"} if "weight_packed" in part else set())
    shares = {name: part[name].chunk(count, -1)[rank].contiguous() for name in names & part.keys()}
    return part | shares
