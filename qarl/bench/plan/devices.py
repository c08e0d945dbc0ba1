"""Rates of a device: from NVIDIA's data sheets, or measured by `qarl bench kernels`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.bench.plan.assumptions import LINK, MEMORY
from qarl.errors import UserError
from qarl.schemes import engine_scheme_names, get_scheme


@dataclass(frozen=True)
class DataSheet:
    """A GPU in NVIDIA's data sheet for SXM.

    flop_per_s     dense products by number format: bf16, int8, fp8
    memory         bytes/s
    memory_bytes   size of the memory
    link, network  bytes/s of NVLink and of a GPU's network adapter, in one direction
    """

    flop_per_s: Mapping[str, float]
    memory: float
    memory_bytes: int
    link: float
    network: float


_HOPPER = {"bf16": 989.4e12, "int8": 1978.9e12, "fp8": 1978.9e12}
_AMPERE = {"bf16": 312e12, "int8": 624e12, "fp8": 312e12}  # no FP8 products: the rate of BF16
SHEETS = {
    "h100": DataSheet(_HOPPER, 3.35e12, 80 * 10**9, 450e9, 50e9),
    "h200": DataSheet(_HOPPER, 4.8e12, 141 * 10**9, 450e9, 50e9),
    "h800": DataSheet(_HOPPER, 3.35e12, 80 * 10**9, 200e9, 50e9),
    "a100": DataSheet(_AMPERE, 2.039e12, 80 * 10**9, 300e9, 25e9),
}


@dataclass(frozen=True)
class Measured:
    """The rate of a product with `rows` rows."""

    rows: float
    flop_per_s: float


@dataclass(frozen=True)
class Rates:
    """Rates of one device. `product`: scheme -> its points. `memory`, `link` and `network`: bytes/s. `sources`: for
    each rate a line of text that says whether it was measured or assumed."""

    device: str
    product: Mapping[str, Sequence[Measured]]
    memory: float
    sources: tuple[str, ...]
    memory_bytes: int = 0
    link: float = math.inf
    network: float = math.inf

    def flop_per_s(self, scheme: str, rows: float) -> float:
        """Return the rate of the point in `product` whose number of rows is nearest to `rows`."""
        target_rows = max(rows, 1)

        def distance(point: Measured) -> float:
            return abs(math.log(point.rows / target_rows))

        return min(self.product[scheme], key=distance).flop_per_s


def assumed_rates(gpu: str) -> Rates:
    """Return the rates of NVIDIA's data sheet for `gpu`, each multiplied by an assumed share."""
    sheet = SHEETS[gpu]
    product = {}
    sources = []
    for name in engine_scheme_names():
        terms = get_scheme(name).plan
        peak = sheet.flop_per_s[terms.rate]
        rate = terms.efficiency * peak
        product[name] = [Measured(1.0, rate)]
        share = f"{terms.efficiency} of the data sheet's {peak / 1e12:.0f}"
        sources.append(f"{name} product {rate / 1e12:.0f} TFLOP/s (assumed: {share})")
    sources += [
        _assumed("memory", MEMORY, sheet.memory),
        _assumed("NVLink", LINK, sheet.link),
        _assumed("network", LINK, sheet.network),
    ]
    return Rates(
        device=gpu.upper(),
        product=product,
        memory=MEMORY * sheet.memory,
        sources=tuple(sources),
        memory_bytes=sheet.memory_bytes,
        link=LINK * sheet.link,
        network=LINK * sheet.network,
    )


def _assumed(name: str, share: float, rate: float) -> str:
    assumed = f"assumed: {share} of the data sheet's {rate / 1e9:.0f}"
    return f"{name} {share * rate / 1e9:.0f} GB/s ({assumed})"


def measured_rates(path: Path) -> Rates:
    """Read rates from a file of `qarl.bench kernels`. For each scheme, use its first kernel, as the trainer does.
    Raise UserError if the file cannot be read or has no BF16 product."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        results = [entry for entry in document["results"] if entry["operation"] == "linear"]
        memory = float(document["ceilings"]["copy_bytes_per_s"])
        return _rates(document["device"], results, memory)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "the file is not from qarl.bench kernels, or has no BF16 linear product"
        raise UserError(what, where=f"rates={path}", why=str(error)) from error


def _rates(device: str, results: Sequence[Mapping[str, Any]], memory: float) -> Rates:
    unquantized, *low_bit = engine_scheme_names()
    product: dict[str, Sequence[Measured]] = {}
    sources = [f"memory {memory / 1e9:.1f} GB/s (measured: a copy)"]
    for scheme in (unquantized, *low_bit):
        kernel, points = _points(results, scheme)
        product[scheme] = points or product[unquantized]
        best = max(point.flop_per_s for point in product[scheme]) / 1e12
        why = f"measured: {kernel}"
        if not points:
            why = f"assumed: the same as {unquantized}, since it was not measured"
        sources.append(f"{scheme} product up to {best:.2f} TFLOP/s ({why})")
    return Rates(device, product, memory, tuple(sources))


def _points(
    results: Sequence[Mapping[str, Any]], scheme: str
) -> tuple[str | None, Sequence[Measured]]:
    """Return the first kernel of `scheme` that is not the reference, and its rates."""
    of_scheme = [entry for entry in results if entry["scheme"] == scheme]
    kernels = [entry["kernel"] for entry in of_scheme if entry["kernel"] != "reference"]
    if not kernels:
        return None, []
    points = []
    for entry in of_scheme:
        if entry["kernel"] == kernels[0]:
            flop = 2.0 * entry["m"] * entry["n"] * entry["k"]
            rate = flop / entry["seconds"]["median"]
            points.append(Measured(float(entry["m"]), rate))
    return kernels[0], points
