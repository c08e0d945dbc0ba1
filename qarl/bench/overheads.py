"""What `qarl bench plan` takes from counting: launches and bytes of a layer beyond a roofline's.

A layer consists of products, experts and the rest (`qarl.bench.unquantized`). Products and experts of a low-bit trainer
are QaRL's own, counted by `qarl.bench.costs`, those of a BF16 trainer are transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from qarl.bench.sources import default_group_size
from qarl.bench.terms import Cost
from qarl.checks.model_size import ModelSize

if TYPE_CHECKING:
    from qarl.bench.costs.phases import Phase


@dataclass(frozen=True)
class Overheads:
    """Counts of one layer. `forward` and `backward`: bytes beyond those of products. Others: all bytes."""

    forward: Cost = field(default_factory=Cost)
    backward: Cost = field(default_factory=Cost)
    quantize: Cost = field(default_factory=Cost)
    sender: Cost = field(default_factory=Cost)
    receiver: Cost = field(default_factory=Cost)
    optimizer_kernels: int = 0
    optimizer_bytes_per_weight: float = 0.0


def overheads(size: ModelSize, trainer: str, published: str, tokens: int, gpus: int) -> Overheads:
    """Count a layer. `trainer` and `published`: the schemes of its products and of the publish."""
    forward, backward = _passes(size, trainer, tokens)
    quantize, sender, receiver = _publish(size, published, gpus)
    return Overheads(forward, backward, quantize, sender, receiver, *_optimizer(size, gpus))


@cache
def _passes(size: ModelSize, trainer: str, tokens: int) -> tuple[Cost, Cost]:
    from qarl.bench.costs import phases
    from qarl.bench.unquantized import LINEARS, rest_of_layer, transformers_experts

    group = default_group_size(size)
    forward, backward = ([cost] for cost in rest_of_layer(size, tokens))
    if trainer == "bf16":
        linears = len(phases.dense_shapes(size))
        forward.append(Cost(LINEARS[0] * linears))
        backward.append(Cost(LINEARS[1] * linears))
        if size.experts:
            for costs, cost in zip((forward, backward), transformers_experts(size, tokens), strict=True):
                costs.append(cost)
    else:
        own = phases.dense_phases(size, trainer, group, tokens)
        own += phases.expert_phases(size, trainer, group, tokens) if size.experts else []
        for phase in own:
            (backward if phase.name.startswith("backward") else forward).append(_beyond_least(phase))
    return _sum(forward), _sum(backward)


@cache
def _publish(size: ModelSize, scheme: str, gpus: int) -> tuple[Cost, Cost, Cost]:
    from qarl.bench.costs import phases

    group = default_group_size(size)
    quantize = Cost() if scheme == "bf16" else _whole(phases.quantize_phase(size, scheme, group, gpus))
    sender, receiver = phases.publish_phase(size, scheme, group), phases.receive_phase(size, scheme, group)
    return quantize, _whole(sender), _whole(receiver)


@cache
def _optimizer(size: ModelSize, gpus: int) -> tuple[int, float]:
    from qarl.bench.costs.phases import optimizer_phase

    phase, weights = optimizer_phase(size, gpus)
    return phase.counts.kernels, phase.counts.moved / weights


def _sum(costs: list[Cost]) -> Cost:
    return Cost(*map(sum, zip(*costs, strict=True)))


def _whole(phase: Phase) -> Cost:
    return Cost(phase.counts.kernels, phase.counts.moved, phase.counts.copies + phase.counts.syncs)


def _beyond_least(phase: Phase) -> Cost:
    return _whole(phase)._replace(moved=max(phase.counts.moved - phase.least, 0))
