"""Compares the engine's log-probs with the actor's own rounding noise (`qarl.align.model`), before the first update.

It takes three forwards without gradients of each rank's first micro-batch, once per start. As in
`qarl.trainer.mismatch_watch`, the forward multiplies by the published tensors and, on a CPU, has the arithmetic of
level `model` where that exists, also at `linears` and `off`. It does not

- for experts that are not quantized: their replacements are made before FSDP2 shards them
- if an engine has several workers (`qarl.align.model.split_unavailable`)

An actor without the section `quant` is not compared: its engine may be quantized by other means, and that mismatch is
what TBPO weighs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from verl.utils.device import get_device_id
from verl.workers.utils.padding import no_padding_2_padding

from qarl.align.model import Roots, engine_arithmetic
from qarl.metrics.mismatch_limit import NOISE_LIMITS, check_noise, times_noise
from qarl.quant.convert import published_forward
from qarl.quant.expert_names import stacked_experts
from qarl.quant.experts import QuantExperts
from qarl.verl.plugin.routing import RouterReplay


def check_first(engine: Any, forward_step: Callable[..., Any], micro_batch: Any, rows: Any) -> None:
    """Raise MismatchError on every rank if |δ| of the first micro-batches is more than rounding explains.

    Only the first call compares. Nothing is compared without rollout log-probs, at level `exact`, or if
    `mismatch_limit` is set, which replaces this limit. Every rank of the data-parallel group must call this function,
    because it is a collective.

    Args:
        engine: QaRL's engine for verl. Its attribute `compared` is set when the comparison has passed.
        forward_step: verl's `forward_step`.
        rows: padded `rollout_log_probs` and `response_mask` of `micro_batch`, each [B, T].
    """
    rollout, level = rows.get("rollout_log_probs", None), engine._limit_level
    if rollout is None or getattr(engine, "compared", False) or level not in NOISE_LIMITS:
        return
    if engine.quant is None or engine.quant.mismatch_limit is not None:
        return

    def log_probs() -> torch.Tensor:
        _, output = forward_step(micro_batch, None, True)
        found: torch.Tensor = no_padding_2_padding(output["model_output"]["log_probs"], micro_batch).float()
        return found

    mask, roots = rows["response_mask"].to(get_device_id()), Roots()
    routing, engine._routing = engine._routing, RouterReplay()  # so that these forwards do not enter its counts
    try:
        with ExitStack() as stack:
            if level in ("off", "linears") and may_align(engine):
                aligned = stack.enter_context(engine_arithmetic(engine.module, dtype=torch.bfloat16))
                level = "model" if aligned else level
            if engine.align == "off" and engine.scheme.quantized:
                stack.enter_context(published_forward(engine.module, engine.scheme, engine.ignore))
            roots.add(engine.module, log_probs, rollout, mask)
    finally:
        engine._routing.begin(engine.module, {}, mask)  # ends its replay
        engine._routing = routing
    sums = torch.tensor([roots.delta, roots.noise, roots.tokens], dtype=torch.float64)
    if torch.distributed.is_initialized():
        sums = sums.to(get_device_id())
        torch.distributed.all_reduce(sums, group=engine.get_data_parallel_group())
    delta, noise, tokens = sums.tolist()
    check_noise(times_noise(delta, noise, tokens), level=level, tokens=tokens)
    engine.compared = True


def may_align(engine: Any) -> bool:
    """Return whether the module's forward may get the arithmetic of level `model` after FSDP2 has sharded it."""
    if engine.quant.tensor_model_parallel_size > 1:
        return False
    return all(isinstance(experts, QuantExperts) for experts in stacked_experts(engine.module).values())
