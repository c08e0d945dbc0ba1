"""Checks that the group size divides the layers, and that vLLM can split them over the GPUs of an engine."""

from __future__ import annotations

from qarl.checks import layers
from qarl.checks.tensor_parallel import KEY, SplitModel
from qarl.doctor.context import Context
from qarl.doctor.findings import Topic


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
    engines = context.config.quant.kernels == "engine"
    if context.target.device == "cpu" and context.scheme.name == "w4a16" and engines:
        layers.check_engine_shapes(context.quantized.get())


def check_tensor_parallel(context: Context, topic: Topic) -> None:
    """Whether heads, layers and vocabulary split over the GPUs of an engine."""
    parallel = context.config.rollout.tensor_model_parallel_size
    if parallel == 1:
        return
    size, scheme = context.size.get(), context.scheme
    model = SplitModel(
        heads=size.heads,
        kv_heads=size.kv_heads,
        vocabulary=size.vocab,
        linears=size.linears(),
        quantized=context.quantized.get() if scheme.quantized else {},
        scheme=scheme,
        on_cpu=context.target.device == "cpu",
    )
    problems = model.problems(parallel)
    for problem in problems:
        topic.refusal(problem)
    if not problems:
        group = f", no group of {scheme.group_size} is split" if scheme.group_size else ""
        repeated = f" (of {size.kv_heads}, each on {parallel // size.kv_heads} GPUs)" * (parallel > size.kv_heads)
        kv_heads = max(size.kv_heads // parallel, 1)
        topic.ok(
            f"{KEY}={parallel}: each GPU has {size.heads // parallel} heads and {kv_heads} kv heads{repeated}, "
            f"all layers split evenly{group}"
        )


CHECKS = (check_groups, check_engine_kernel, check_tensor_parallel)
