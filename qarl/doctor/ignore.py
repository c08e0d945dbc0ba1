"""Checks that trainer and vLLM leave the same layers in BF16 for `quant.ignore`, also if vLLM fuses layers."""

from __future__ import annotations

from collections.abc import Iterable

from qarl.checks import layers
from qarl.checks.model_size import ModelSize
from qarl.config.ignore import is_ignored, resolve_ignored
from qarl.doctor.context import Context, NotCheckedError
from qarl.doctor.findings import Topic
from qarl.process import vllm_missing
from qarl.rollout import kernel_prediction


def check_fused(context: Context, topic: Topic) -> None:
    """Whether quant.ignore treats all parts of a fused layer alike."""
    if context.scheme.quantized:
        layers.check_fused_layers(context.linears.get(), context.ignore)


def check_resolved(context: Context, topic: Topic) -> None:
    """Which layers stay in BF16, and which entries of quant.ignore match no layer."""
    if not context.scheme.quantized:
        topic.ok("scheme bf16: nothing is quantized, quant.ignore is not used")
        return
    linears = context.linears.get()
    resolved = resolve_ignored(linears, context.ignore)
    context.quantized.load()
    topic.ok(f"{len(resolved.quantized)} of {len(linears)} linears are quantized; in BF16: {_named(resolved.ignored)}")
    # These entries may match nothing: lm_head, which may be tied, and routers, which are linears only in vLLM.
    known = set(resolved.unmatched) - {"lm_head", *_router_entries(context)}
    if known:
        topic.warning(
            f"entries of quant.ignore that match no linear: {', '.join(sorted(known))}",
            where="quant.ignore",
            why="a name must be complete (model.layers.0.mlp.down_proj), and a re: pattern must match a name's start",
            fix="correct them, or remove them",
        )


def check_engine_agrees(context: Context, topic: Topic) -> None:
    """Whether vLLM reads quant.ignore as the trainer does."""
    if not context.scheme.quantized:
        return
    if why_not := vllm_missing():
        raise NotCheckedError(why_not, "make setup")
    linears = context.linears.get()
    groups = layers.fused_groups(linears)
    only_ours: list[str] = []
    only_theirs: list[str] = []
    for fused, members in groups.items():
        ours = all(is_ignored(name, context.ignore) for name in members)
        try:
            theirs = kernel_prediction.leaves_unquantized(fused, context.ignore, layers.FUSED_LAYERS)
        except ValueError:
            continue  # a split group, which check_fused has reported
        if ours != theirs:
            (only_ours if ours else only_theirs).extend(members)
    if only_ours or only_theirs:
        topic.error(
            "trainer and rollout engine would quantize different layers",
            where=f"BF16 only in the trainer: {_named(only_ours)}; only in vLLM: {_named(only_theirs)}",
            why="the trainer and vLLM read an entry of quant.ignore differently",
            fix="list the layers by their exact names, and all parts of a fused layer (q/k/v, gate/up) together",
        )
    else:
        topic.ok(f"the trainer and vLLM leave the same layers in BF16 (vLLM has {len(groups)} layers after fusing)")


def check_routers(context: Context, topic: Topic) -> None:
    """Whether the routers of mixture-of-experts layers stay in BF16 in vLLM."""
    size = context.size.get()
    if not (size.experts and context.scheme.quantized):
        return
    if why_not := vllm_missing():
        raise NotCheckedError(why_not, "make setup")
    routers = _routers(size)
    quantized = [name for name in routers if not kernel_prediction.leaves_unquantized(name, context.ignore, {})]
    if quantized:
        topic.error(
            f"vLLM would quantize {len(quantized)} routers, which the trainer keeps in BF16",
            where=f"quant.ignore: {_named(quantized)}",
            why="a router is a linear layer in vLLM but not in transformers",
            fix='add "re:.*mlp[.]gate$" to quant.ignore',
        )
    else:
        topic.ok(f"{len(routers)} routers stay in BF16")


def _routers(size: ModelSize) -> list[str]:
    """Return vLLM's names of the routers. They are linear layers in vLLM but not in transformers."""
    return [f"model.layers.{layer}.mlp.gate" for layer in size.sparse_layers]


def _router_entries(context: Context) -> list[str]:
    """Return the entries of `quant.ignore` that match a router."""
    routers = _routers(context.size.get())
    return [entry for entry in context.ignore if any(is_ignored(name, [entry]) for name in routers)]


def _named(names: Iterable[str]) -> str:
    return layers.name_layers(names) or "none"


CHECKS = (check_fused, check_resolved, check_engine_agrees, check_routers)
