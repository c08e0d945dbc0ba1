"""The bounds that the kernels are held to on an H200, judged from what `qarl.bench kernels` wrote down.

A bound that is missed is shown with the share of the roofline that was reached; one that nothing was measured for says
so. Speeds are medians; a kernel without a figure (its numbers were wrong, or it did not run) misses its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

Entry = dict[str, Any]


class Verdict(NamedTuple):
    """One bound on one shape; `verdict` is met, missed or not measured."""

    bound: str
    where: str
    figure: str
    verdict: str


class Bound(NamedTuple):
    """`figure(entries of one shape)` of at least `least` for every shape that `serves`; None: nothing to judge."""

    text: str
    least: float
    operation: str
    serves: Callable[[int], bool]
    kernels: tuple[tuple[str, str], ...]
    against: tuple[str, str] | None = ("bf16", "bf16")


BOUNDS = (
    Bound("W4A16, M <= 16: 2.5x BF16", 2.5, "linear", lambda m: m <= 16, (("w4a16", "triton"),)),
    Bound(
        "W4A16, M <= 16: 0.9x Marlin", 0.9, "linear", lambda m: m <= 16, (("w4a16", "triton"),),
        ("w4a16", "vllm_marlin"),
    ),
    Bound("W4A16, M >= 4096: 0.9x BF16", 0.9, "linear", lambda m: m >= 4096, (("w4a16", "triton"),)),
    Bound("W8A8, M >= 4096: 1.5x BF16", 1.5, "linear", lambda m: m >= 4096, (("w8a8", "triton"),)),
    Bound("FP8, M >= 4096: 1.5x BF16", 1.5, "linear", lambda m: m >= 4096, (("fp8", "triton"),)),
    Bound("transposed W4A16, M = 4096: 0.8x BF16", 0.8, "input_gradient", lambda m: m == 4096, (("w4a16", "triton"),)),
    Bound(
        "quantize and pack: 70% of a copy", 0.7, "quantize", lambda m: True,
        tuple((scheme, kernel) for scheme in ("w4a16", "w8a8", "fp8")
              for kernel in ("triton", "triton, and the BF16 copy")),
        None,
    ),
)  # fmt: skip
BESIDE = {"transposed W4A16, M = 4096: 0.8x BF16": ("w4a16", "triton, fused")}
"""A figure that is shown beside, and not judged."""
GEMLITE = "gemlite beaten or matched on most shapes"
MATCHED = 0.97
"""As fast as gemlite to the spread of two medians."""


def verdicts(results: Sequence[Entry]) -> list[Verdict]:
    """One for every bound and shape."""
    found: list[Verdict] = []
    for bound in BOUNDS:
        found += list(_judge(bound, results)) or [Verdict(bound.text, "", "no such shape was measured", "not measured")]
    return [*found, _gemlite(results)]


def table(found: Iterable[Verdict]) -> str:
    """Markdown."""
    rows = [f"| {line.bound} | {line.where} | {line.figure} | {line.verdict} |" for line in found]
    return "\n".join(["| bound | shape | found | |", "|---|---|---|---|", *rows])


def _shapes(results: Sequence[Entry], operation: str) -> dict[tuple[Any, ...], dict[tuple[str, str], Entry]]:
    """{(layer, n, k, m): {(scheme, kernel): entry}}."""
    shapes: dict[tuple[Any, ...], dict[tuple[str, str], Entry]] = {}
    for entry in results:
        if entry["operation"] == operation:
            key = (entry["layer"], entry["n"], entry["k"], entry["m"])
            shapes.setdefault(key, {})[entry["scheme"], entry["kernel"]] = entry
    return shapes


def _judge(bound: Bound, results: Sequence[Entry]) -> Iterator[Verdict]:
    for (layer, n, k, m), entries in _shapes(results, bound.operation).items():
        if not bound.serves(m):
            continue
        for name in bound.kernels:
            where = f"{layer} [{n}, {k}]" + (f", M = {m}" if m else f", {' '.join(name)}")
            mine, other = entries.get(name), entries.get(bound.against) if bound.against else None
            if mine is None:
                yield Verdict(bound.text, where, f"{' '.join(name)} has no figure", "missed")
            elif bound.against and other is None:
                yield Verdict(bound.text, where, f"{' '.join(bound.against)} is not here", "not measured")
            else:
                value = _seconds(other) / _seconds(mine) if other else mine["share_of_copy"]
                figure = f"{value:.2f}x" if other else f"{value:.0%}"
                if beside := entries.get(BESIDE.get(bound.text, ("", ""))):
                    figure += f" (fused: {_seconds(other or beside) / _seconds(beside):.2f}x)"
                if value >= bound.least:
                    yield Verdict(bound.text, where, figure, "met")
                else:
                    yield Verdict(bound.text, where, figure + _roofline(mine), "missed")


def _gemlite(results: Sequence[Entry]) -> Verdict:
    ratios = [
        _seconds(entries["w4a16", "gemlite"]) / _seconds(entries["w4a16", "triton"])
        for entries in _shapes(results, "linear").values()
        if ("w4a16", "gemlite") in entries and ("w4a16", "triton") in entries
    ]
    if not ratios:
        return Verdict(GEMLITE, "", "gemlite is not here", "not measured")
    good = sum(ratio >= MATCHED for ratio in ratios)
    verdict = "met" if 2 * good > len(ratios) else "missed"
    return Verdict(GEMLITE, "", f"on {good} of {len(ratios)} shapes", verdict)


def _roofline(entry: Entry) -> str:
    product = entry["share_of_bf16_product"]
    shares = [f"{entry['share_of_copy']:.0%} of a copy's bytes/s"]
    shares += [f"{product:.0%} of the BF16 product's FLOP/s"] if product else []
    return f"; at {', '.join(shares)}"


def _seconds(entry: Entry) -> float:
    return float(entry["seconds"]["median"])
