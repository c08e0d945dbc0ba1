"""The bounds that scripts/gpu_check.py holds the kernels to, and the verdict on each from a benchmark's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class Bound(NamedTuple):
    """`kernels` must be `least` times as fast as `against` on every shape that `serves`, or reach that share of a copy
    if there is nothing to be compared with."""

    text: str
    least: float
    operation: str
    serves: Callable[[int], bool]
    kernels: tuple[str, ...]
    against: str | None = "bf16 bf16"


QUANTIZERS = ("w4a16 triton", "w8a8 triton", "fp8 triton")
BOUNDS = (
    Bound("W4A16, M <= 16: 3x BF16", 3.0, "linear", lambda m: m <= 16, ("w4a16 triton",)),
    Bound(
        "W4A16, M <= 16: 0.9x Marlin",
        0.9,
        "linear",
        lambda m: m <= 16,
        ("w4a16 triton",),
        "w4a16 vllm_marlin",
    ),
    Bound("W4A16, M >= 4096: 0.9x BF16", 0.9, "linear", lambda m: m >= 4096, ("w4a16 triton",)),
    Bound("W8A8, M >= 4096: 1.6x BF16", 1.6, "linear", lambda m: m >= 4096, ("w8a8 triton",)),
    Bound("FP8, M >= 4096: 1.6x BF16", 1.6, "linear", lambda m: m >= 4096, ("fp8 triton",)),
    Bound(
        "transposed W4A16, M = 4096: 0.8x BF16",
        0.8,
        "input_gradient",
        lambda m: m == 4096,
        ("w4a16 triton",),
    ),
    Bound("quantize and pack: 70% of a copy", 0.7, "quantize", lambda m: True, QUANTIZERS, None),
)
"""The kernels are held to these on an H200."""


def verdicts(results: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """(bound, shape, figure, met | missed | not measured) for every bound and shape. A kernel without a figure (its
    numbers were wrong, or it did not run) misses its bound."""
    return [line for bound in BOUNDS for line in list(judge(bound, results))
            or [(bound.text, "", "no such shape was measured", "not measured")]]  # fmt: skip


def judge(bound: Bound, results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    shapes: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for entry in results:
        if entry["operation"] == bound.operation and bound.serves(entry["m"]):
            key = (entry["layer"], entry["n"], entry["k"], entry["m"])
            shapes.setdefault(key, {})[f"{entry['scheme']} {entry['kernel']}"] = entry
    for (layer, n, k, m), entries in shapes.items():
        for name in bound.kernels:
            where = f"{layer} [{n}, {k}]" + (f", M = {m}" if m else f", {name}")
            measured = entries.get(name)
            other = entries.get(bound.against or "")
            if measured is None:
                yield bound.text, where, f"{name} has no figure", "missed"
            elif bound.against and other is None:
                yield bound.text, where, f"{bound.against} is not here", "not measured"
            else:
                value = (
                    other["seconds"]["median"] / measured["seconds"]["median"]
                    if other
                    else measured["share_of_copy"]
                )
                figure = f"{value:.2f}x" if other else f"{value:.0%}"
                reached = f"; at {measured['share_of_copy']:.0%} of a copy's bytes/s"
                if measured["share_of_bf16_product"]:
                    reached += (
                        f", {measured['share_of_bf16_product']:.0%} of the BF16 product's FLOP/s"
                    )
                met = value >= bound.least
                yield bound.text, where, figure + reached * (not met), "met" if met else "missed"
