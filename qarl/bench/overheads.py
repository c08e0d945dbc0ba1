"""What `qarl bench plan` takes from `qarl bench costs`: launches and bytes of a layer beyond a roofline's."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from qarl.bench.sources import default_group_size
from qarl.checks.model_size import ModelSize


class Moved(NamedTuple):
    """Kernels and bytes of a phase of one layer."""

    kernels: int = 0
    moved: int = 0


@dataclass(frozen=True)
class Overheads:
    """Counts of one layer. `beyond_least`: bytes of the backward that its products do not need."""

    forward: Moved = field(default_factory=Moved)
    backward: Moved = field(default_factory=Moved)
    publish: Moved = field(default_factory=Moved)
    beyond_least: int = 0
    optimizer_kernels: int = 0
    optimizer_bytes_per_weight: float = 0.0


@cache
def overheads(size: ModelSize, trainer: str, published: str, tokens: int, gpus: int) -> Overheads:
    """Count a layer. `trainer` and `published`: the schemes of its products and of the publish.

    A trainer in BF16 runs transformers' own layers, of which nothing is counted here.
    """
    from qarl.bench.costs.phases import Phase, dense_phases, expert_phases, optimizer_phase, publish_phase

    group = default_group_size(size)
    publish = publish_phase(size, published, group)
    optimizer, weights = optimizer_phase(size, gpus)
    phases: dict[str, list[Phase]] = {}
    if trainer != "bf16":
        found = dense_phases(size, trainer, group, tokens)
        found += expert_phases(size, trainer, group, tokens) if size.experts else []
        for phase in found:
            phases.setdefault(phase.name.partition(",")[0], []).append(phase)
    forward, backward = phases.get("forward", []), phases.get("backward", [])
    return Overheads(
        forward=Moved(sum(p.counts.kernels for p in forward), sum(p.counts.moved for p in forward)),
        backward=Moved(sum(p.counts.kernels for p in backward), sum(p.counts.moved for p in backward)),
        publish=Moved(publish.counts.kernels, publish.counts.moved),
        beyond_least=sum(max(p.counts.moved - p.least, 0) for p in backward),
        optimizer_kernels=optimizer.counts.kernels,
        optimizer_bytes_per_weight=optimizer.counts.moved / weights,
    )
