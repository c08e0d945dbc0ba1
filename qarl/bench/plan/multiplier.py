"""Who multiplies by the weights of a step: the kernels say how fast they are, and whether rows depend on each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qarl.kernels.base import LinearKernel
from qarl.kernels.registry import kernels_of
from qarl.kernels.speed import CUBLAS, Speed
from qarl.schemes import UNQUANTIZED, Scheme
from qarl.schemes.kernel_choice import KernelChoice

PLAIN = UNQUANTIZED.name
"""The name of the BF16 product, as in the results of `qarl bench kernels`."""


class Measured(NamedTuple):
    """The rate of a product with `rows` rows."""

    rows: float
    flop_per_s: float


@dataclass(frozen=True)
class Multiplier:
    """A kernel for the linears of a scheme.

    scheme  says how many bytes a weight has
    kernel  its name in the rates; "assumed" if no kernel of the scheme was measured there
    points  its rates by number of rows
    """

    scheme: Scheme
    kernel: str
    points: Sequence[Measured]

    def flop_per_s(self, rows: float) -> float:
        """Return the rate of the point whose number of rows is nearest to `rows`."""
        target_rows = max(rows, 1)

        def distance(point: Measured) -> float:
            return abs(math.log(point.rows / target_rows))

        return min(self.points, key=distance).flop_per_s


def gpu_speeds(scheme: Scheme) -> dict[str, Speed]:
    """Return the speed of each kernel of `scheme` that says one, in order of preference."""
    if not scheme.quantized:
        return {PLAIN: CUBLAS}
    kernels = [kernel for choice in KernelChoice for kernel in _of_scheme(scheme, choice)]
    return {kernel.name: kernel.speed for kernel in kernels if kernel.speed is not None}


def multiplier(
    product: Mapping[str, Mapping[str, Sequence[Measured]]],
    scheme: Scheme,
    choice: KernelChoice = KernelChoice.ENGINE,
) -> Multiplier:
    """Return the first kernel that `choice` may take for `scheme` and of which `product` has rates, by its own name or
    that of the kernel whose speed it says; without one, the first that `product` has."""
    rates = product[scheme.name]
    for kernel in _of_scheme(scheme, choice):
        names = [kernel.name] if kernel.speed is None else [kernel.name, kernel.speed.measured]
        for name in names:
            if name in rates:
                return Multiplier(scheme, kernel.name, rates[name])
    name = next(iter(rates))
    return Multiplier(scheme, name, rates[name])


def invariant_choice(scheme: Scheme) -> KernelChoice | None:
    """Return the value of quant.kernels at which no row of a product depends on the others on a GPU, or None: the
    engine's own kernels if they are so, otherwise the fastest for the rows of an update."""
    fastest: dict[KernelChoice, float] = {}
    for choice in KernelChoice:
        first = next((kernel for kernel in _of_scheme(scheme, choice) if kernel.speed), None)
        if first is None or first.speed is None or not first.row_invariant:
            continue
        if choice.by_engine:
            return choice
        fastest[choice] = max(first.speed.shares).share
    return max(fastest, key=lambda choice: fastest[choice]) if fastest else None


def _of_scheme(scheme: Scheme, choice: KernelChoice) -> list[type[LinearKernel]]:
    return [
        kernel
        for kernel in kernels_of(choice, scheme.operands)
        if not kernel.reference
        and (kernel.group_sizes is None or scheme.group_size in (None, *kernel.group_sizes))
    ]
