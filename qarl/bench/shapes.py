"""Layer shapes of the models that are benchmarked, from the numbers of their configs, as the trainer multiplies them.

The trainer keeps q, k, v and gate, up apart; the engine multiplies them as one. A shape that several layers of a model
share is measured once. Of a mixture of experts, `expert_*` are one expert's layers, as dense products.
"""

from __future__ import annotations

from typing import NamedTuple


class Layer(NamedTuple):
    """A weight [N, K]."""

    name: str
    n: int
    k: int


def _dense(hidden: int, q: int, kv: int, intermediate: int) -> tuple[Layer, ...]:
    return (*_attention(hidden, q, kv), Layer("gate_up", intermediate, hidden), Layer("down", hidden, intermediate))


def _attention(hidden: int, q: int, kv: int) -> tuple[Layer, ...]:
    return (Layer("q", q, hidden), Layer("kv", kv, hidden), *([Layer("o", hidden, q)] if q != hidden else []))


MODELS: dict[str, tuple[Layer, ...]] = {
    "qwen2.5-1.5b": _dense(1536, 1536, 256, 8960),
    "qwen2.5-7b": _dense(3584, 3584, 512, 18944),
    "qwen3-8b": _dense(4096, 4096, 1024, 12288),
    "qwen3-30b-a3b": (
        *_attention(2048, 4096, 512),
        Layer("expert_gate_up", 768, 2048),
        Layer("expert_down", 2048, 768),
    ),
    "small": (Layer("gate_up", 3072, 1024),),
}
"""`small` is for CPUs."""


class Experts(NamedTuple):
    """All experts of one layer: gate with up is [E, 2I, H], down [E, H, I]."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int


EXPERTS: dict[str, Experts] = {
    "qwen3-30b-a3b": Experts(experts=128, top_k=8, hidden=2048, intermediate=768),
    "small": Experts(experts=8, top_k=2, hidden=256, intermediate=128),
}
ROWS = (1, 16, 64, 512, 4096, 16384)
CPU_ROWS = (64, 512, 4096)
