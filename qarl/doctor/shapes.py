"""Checks that layers divide by the group size and by `rollout.tensor_model_parallel_size`, as vLLM shards them.

vLLM splits q, k, v, gate and up along N, and o and down along K. All weights along K that share a scale must be on one
GPU. Key and value heads are split if there are enough and repeated otherwise (vllm: QKVParallelLinear). The vocabulary
is padded to a multiple of 64 and then split.
"""

from __future__ import annotations

from collections.abc import Mapping

from qarl.checks import layers
from qarl.checks.model_size import ModelSize
from qarl.doctor.context import Context
from qarl.doctor.findings import Topic

ROW_PARALLEL = ("o_proj", "down_proj")
"""Linears that are split along K; all other linears of a block are split along N."""
VOCABULARY_PADDING = 64


def check_groups(context: Context, topic: Topic) -> None:
    """Whether the group size divides every layer."""
    scheme = context.scheme
    if not scheme.quantized:
        topic.ok("scheme bf16: no groups")
        return
    shapes = context.quantized.get()
    layers.check_group_size(shapes, scheme)
    if scheme.group_size:
        topic.ok(f"quant.group_size={scheme.group_size} divides the inputs of all {len(shapes)} quantized layers")
    else:
        topic.ok(f"{scheme.name} has one scale per output channel, so layers may have any size")


def check_engine_kernel(context: Context, topic: Topic) -> None:
    """Whether vLLM's W4A16 kernel for CPUs supports the layer sizes."""
    if context.target.device == "cpu" and context.scheme.name == "w4a16":
        layers.check_engine_shapes(context.quantized.get())


def check_tensor_parallel(context: Context, topic: Topic) -> None:
    """Whether heads, layers and vocabulary split over the GPUs of an engine."""
    parallel = context.config.rollout.tensor_model_parallel_size
    if parallel == 1:
        return
    size = context.size.get()
    key = "rollout.tensor_model_parallel_size"
    problems = [
        *_heads(size, parallel),
        *_vocabulary(size, parallel),
        *_rows_and_columns(size.linears(), parallel),
        *_groups(context.quantized.get(), parallel, context.scheme.group_size),
    ]
    for what, where, why in problems:
        topic.error(f"{key}={parallel}: {what}", where=where, why=why, fix=_working_sizes(context, size))
    if not problems:
        group = f", no group of {context.scheme.group_size} is split" if context.scheme.group_size else ""
        repeated = f" (of {size.kv_heads}, each on {parallel // size.kv_heads} GPUs)" * (parallel > size.kv_heads)
        kv_heads = max(size.kv_heads // parallel, 1)
        topic.ok(
            f"{key}={parallel}: each GPU has {size.heads // parallel} heads and {kv_heads} kv heads{repeated}, "
            f"all layers split evenly{group}"
        )


Problem = tuple[str, str, str]
"""The arguments of a finding: what, where, why."""


def _heads(size: ModelSize, parallel: int) -> list[Problem]:
    found = []
    if size.heads % parallel:
        found.append((f"{size.heads} attention heads do not split", "num_attention_heads", "a GPU holds whole heads"))
    if size.kv_heads % parallel and parallel % size.kv_heads:
        why = "vLLM gives each GPU whole kv heads, or repeats each on the same number of GPUs"
        found.append((f"{size.kv_heads} key-value heads do not split", "num_key_value_heads", why))
    return found


def _vocabulary(size: ModelSize, parallel: int) -> list[Problem]:
    padded = -(-size.vocab // VOCABULARY_PADDING) * VOCABULARY_PADDING
    if padded % parallel == 0:
        return []
    why = f"vLLM pads it to a multiple of {VOCABULARY_PADDING}, then splits it into equal parts"
    return [(f"a vocabulary of {size.vocab} (padded: {padded}) does not split", "vocab_size", why)]


def _rows_and_columns(shapes: Mapping[str, tuple[int, int]], parallel: int) -> list[Problem]:
    """Return the sizes that cannot be split, except those of attention, which `_heads` checks."""
    bad = [
        name
        for name, (n, k) in shapes.items()
        if ".self_attn." not in name and (k if name.endswith(ROW_PARALLEL) else n) % parallel
    ]
    if not bad:
        return []
    n, k = shapes[bad[0]]
    sizes = f"{k if bad[0].endswith(ROW_PARALLEL) else n}"
    why = "every GPU holds an equal part"
    return [(f"a width of {sizes} does not split in {len(bad)} layers", layers.name_layers(bad), why)]


def _groups(shapes: Mapping[str, tuple[int, int]], parallel: int, group: int | None) -> list[Problem]:
    """Return row-parallel layers whose part on one GPU is not a multiple of the group size."""
    if not group:
        return []
    rows = {name: k for name, (_, k) in shapes.items() if name.endswith(ROW_PARALLEL) and k % parallel == 0}
    bad = [name for name, k in rows.items() if k // parallel % group]
    if not bad:
        return []
    parts = sorted({rows[name] // parallel for name in bad})
    inputs = ", ".join(map(str, parts))
    why = f"{inputs} inputs per GPU are not a multiple of group_size={group}, so two GPUs would share a group"
    return [(f"{len(bad)} layers cannot be split along their inputs", layers.name_layers(bad), why)]


def _working_sizes(context: Context, size: ModelSize) -> str:
    quantized, group = context.quantized.get(), context.scheme.group_size
    linears = size.linears()
    good = [
        parallel
        for parallel in (1, 2, 3, 4, 6, 8, 16)
        if not (
            _heads(size, parallel)
            or _vocabulary(size, parallel)
            or _rows_and_columns(linears, parallel)
            or _groups(quantized, parallel, group)
        )
    ]
    smaller = f"; or choose quant.group_size below {group}" if group and group > 32 else ""
    return f"sizes that work here: {', '.join(map(str, good))}{smaller}"


CHECKS = (check_groups, check_engine_kernel, check_tensor_parallel)
