"""Seconds, with what bounds them; and which matrices a model has.

A part is bound by `compute`, `memory`, a `link` between GPUs, or `overhead`: calls, launches, scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from qarl.bench.cost.ceilings import Ceilings, Product
from qarl.checks.memory import ModelSize, wire_bytes

Shape = tuple[float, float]
BOUNDS = ("compute", "memory", "overhead", "link")


@dataclass(frozen=True)
class Part:
    """`name` takes so many seconds, bound by one of `BOUNDS`."""

    name: str
    seconds: float
    bound: str

    def times(self, factor: float) -> Part:
        return replace(self, seconds=self.seconds * factor)


def total(parts: Iterable[Part]) -> float:
    return sum(part.seconds for part in parts)


def scaled(parts: Iterable[Part], factor: float) -> list[Part]:
    return [part.times(factor) for part in parts]


def merged(parts: Iterable[Part]) -> list[Part]:
    """One part for each name and bound."""
    sums: dict[tuple[str, str], float] = {}
    for part in parts:
        sums[part.name, part.bound] = sums.get((part.name, part.bound), 0.0) + part.seconds
    return [Part(name, seconds, bound) for (name, bound), seconds in sums.items()]


def binding(parts: Sequence[Part]) -> str:
    """The bound with most of the seconds; "-" where there are none."""
    by_bound = {bound: total(p for p in parts if p.bound == bound) for bound in BOUNDS}
    most = max(by_bound, key=lambda bound: by_bound[bound])
    return most if by_bound[most] > 0 else "-"


def product_part(
    ceilings: Ceilings,
    product: Product,
    name: str,
    rows: float,
    shapes: Sequence[Shape],
    *,
    weight_bytes: float = 2.0,
    calls: float | None = None,
) -> Part:
    """Products with all of `shapes`. They are bound by arithmetic where it alone, at the highest measured rate, takes
    longer than the bytes do at the rate of a copy."""
    seconds = product.seconds(rows, shapes, calls)
    weights, features = sum(n * k for n, k in shapes), sum(n + k for n, k in shapes)
    arithmetic = 2 * rows * weights / product.flop_per_s
    traffic = (weights * weight_bytes + 2 * rows * features) / ceilings.copy_bytes_per_s
    return Part(name, seconds, "compute" if arithmetic >= traffic else "memory")


def bytes_a_weight(scheme: str, group_size: int) -> float:
    """On the wire and in the engine."""
    n, k = 1024, 16 * group_size
    return wire_bytes(scheme, group_size, (n, k)) / (n * k)


def attention_shapes(size: ModelSize, *, fused: bool, parallel: int = 1) -> list[Shape]:
    """[N, K] of the attention's linears on one of `parallel` GPUs; `fused`: q, k and v are one, as in the engine."""
    query, key = size.query_width / parallel, max(size.kv_width / parallel, size.head_dim)
    into = [(query + 2 * key, size.hidden)] if fused else [(query, size.hidden), *[(key, size.hidden)] * 2]
    return [*into, (size.hidden, query)]


def mlp_shapes(size: ModelSize, width: int, *, fused: bool, parallel: int = 1) -> list[Shape]:
    """[N, K] of one MLP, or of one expert."""
    into = [(2 * width / parallel, size.hidden)] if fused else [(width / parallel, size.hidden)] * 2
    return [*into, (size.hidden, width / parallel)]


def distinct_experts(experts: int, per_token: int, tokens: float) -> float:
    """Expected number of experts that `tokens` tokens need, each `per_token` of `experts` at random."""
    return experts * (1 - (1 - per_token / experts) ** tokens)
