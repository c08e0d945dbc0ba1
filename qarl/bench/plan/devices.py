"""Rates of a device: from NVIDIA's data sheets, or measured by `qarl bench kernels`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qarl.bench.plan.assumptions import LINK, MEMORY
from qarl.bench.plan.multiplier import Measured, gpu_speeds
from qarl.errors import UserError
from qarl.kernels.speed import RESULTS, Speed
from qarl.schemes import engine_scheme_names, get_scheme

ASSUMED = "assumed"
"""Stands for the kernels of a scheme on a device where none was measured."""
LEAST_ROWS = 512
"""A file whose calls were not timed by graphs has the benchmark's own time in its figures of fewer rows
(docs/lookup/results/gpu.md#small-figures-of-that-file)."""


@dataclass(frozen=True)
class DataSheet:
    """A GPU in NVIDIA's data sheet for SXM.

    flop_per_s     dense products by number format: bf16, int8, fp8
    memory         bytes/s
    memory_bytes   size of the memory
    link, network  bytes/s of NVLink and of a GPU's network adapter, in one direction
    hopper         whether kernels' speeds (`qarl.kernels.speed`) are of this architecture
    """

    flop_per_s: Mapping[str, float]
    memory: float
    memory_bytes: int
    link: float
    network: float
    hopper: bool = True


_HOPPER = {"bf16": 989.4e12, "int8": 1978.9e12, "fp8": 1978.9e12}
_AMPERE = {"bf16": 312e12, "int8": 624e12, "fp8": 312e12}  # no FP8 products: the rate of BF16
SHEETS = {
    "h100": DataSheet(_HOPPER, 3.35e12, 80 * 10**9, 450e9, 50e9),
    "h200": DataSheet(_HOPPER, 4.8e12, 141 * 10**9, 450e9, 50e9),
    "h800": DataSheet(_HOPPER, 3.35e12, 80 * 10**9, 200e9, 50e9),
    "a100": DataSheet(_AMPERE, 2.039e12, 80 * 10**9, 300e9, 25e9, hopper=False),
}


@dataclass(frozen=True)
class Rates:
    """Rates of one device.

    product                scheme -> kernel -> its points, in order of preference
    memory, link, network  bytes/s
    sources                for each rate a line of text that says whether it was measured or assumed
    memory_bytes           size of a GPU's memory; 0 on a CPU
    on_gpu                 whether the device is a GPU
    """

    device: str
    product: Mapping[str, Mapping[str, Sequence[Measured]]]
    memory: float
    sources: tuple[str, ...]
    memory_bytes: int = 0
    link: float = math.inf
    network: float = math.inf
    on_gpu: bool = False


def assumed_rates(gpu: str) -> Rates:
    """Return the rates of NVIDIA's data sheet for `gpu`, each multiplied by a share: of products that which each kernel
    says of itself, on GPUs of its architecture, otherwise an assumed one."""
    sheet = SHEETS[gpu]
    product = {}
    sources = []
    for name in engine_scheme_names():
        scheme = get_scheme(name)
        speeds = gpu_speeds(scheme) if sheet.hopper else {}
        product[name] = {kernel: _points_of(speed, sheet) for kernel, speed in speeds.items()}
        sources += [
            _line(name, kernel, points, f"as an H200's in {RESULTS}: {speeds[kernel].measured}")
            for kernel, points in product[name].items()
        ]
        if not speeds:
            share = scheme.plan.efficiency
            peak = sheet.flop_per_s[scheme.plan.rate]
            product[name] = {ASSUMED: [Measured(1.0, share * peak)]}
            why = f"assumed: {share} of the data sheet's {peak / 1e12:.0f}"
            sources.append(_line(name, "", product[name][ASSUMED], why))
    return Rates(
        device=gpu.upper(),
        product=product,
        memory=MEMORY * sheet.memory,
        sources=(*sources, _assumed("memory", MEMORY, sheet.memory), *_links(sheet)),
        memory_bytes=sheet.memory_bytes,
        link=LINK * sheet.link,
        network=LINK * sheet.network,
        on_gpu=True,
    )


def _points_of(speed: Speed, sheet: DataSheet) -> Sequence[Measured]:
    peak = sheet.flop_per_s[speed.rate]
    return [Measured(float(rows), share * peak) for rows, share in speed.shares]


def _line(scheme: str, kernel: str, points: Sequence[Measured], why: str) -> str:
    best = max(point.flop_per_s for point in points) / 1e12
    name = f"{scheme} {kernel}" if kernel and kernel != scheme else scheme
    figure = f"{best:.0f}" if best >= 10 else f"{best:.2f}"
    return f"{name} product up to {figure} TFLOP/s ({why})"


def _links(sheet: DataSheet) -> tuple[str, str]:
    return _assumed("NVLink", LINK, sheet.link), _assumed("network", LINK, sheet.network)


def _assumed(name: str, share: float, rate: float) -> str:
    assumed = f"assumed: {share} of the data sheet's {rate / 1e9:.0f}"
    return f"{name} {share * rate / 1e9:.0f} GB/s ({assumed})"


def measured_rates(path: Path, gpu: str = "h100") -> Rates:
    """Read rates from a file of `qarl.bench kernels`, or of scripts/gpu_check.py with such a part.

    A file of a GPU says nothing of links and of the size of the memory, which come from its data sheet. `gpu`: the
    sheet to take if the GPU's own is not here.

    Raise UserError if the file cannot be read or has no BF16 product."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if "parts" in document:
            document = document["parts"]["bench"]["report"]
        results = [entry for entry in document["results"] if entry["operation"] == "linear"]
        on_gpu = document.get("arguments", {}).get("device") == "cuda"
        if on_gpu:
            results = [entry for entry in results if _is_clean(entry)]
        rates = _rates(document["device"], results, document["ceilings"]["copy_bytes_per_s"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = "the file is not from qarl.bench kernels, or has no BF16 linear product"
        raise UserError(what, where=f"rates={path}", why=str(error)) from error
    return _with_sheet(rates, gpu) if on_gpu else rates


def _is_clean(entry: Mapping[str, Any]) -> bool:
    return entry["seconds"].get("timed") == "graph" or entry["m"] >= LEAST_ROWS


def _with_sheet(rates: Rates, gpu: str) -> Rates:
    named = [name for name in SHEETS if name.upper() in rates.device.upper()]
    sheet = SHEETS[named[0] if named else gpu]
    return replace(
        rates,
        sources=(*rates.sources, *_links(sheet)),
        memory_bytes=sheet.memory_bytes,
        link=LINK * sheet.link,
        network=LINK * sheet.network,
        on_gpu=True,
    )


def _rates(device: str, results: Sequence[Mapping[str, Any]], memory: float) -> Rates:
    unquantized, *low_bit = engine_scheme_names()
    product: dict[str, Mapping[str, Sequence[Measured]]] = {}
    sources = [f"memory {memory / 1e9:.1f} GB/s (measured: a copy)"]
    for scheme in (unquantized, *low_bit):
        product[scheme] = _points(results, scheme)
        sources += [_line(scheme, *item, "measured") for item in product[scheme].items()]
        if not product[scheme]:
            (plain,) = product[unquantized].values()
            product[scheme] = {ASSUMED: plain}
            why = f"assumed: the same as {unquantized}, since it was not measured"
            sources.append(_line(scheme, "", plain, why))
    return Rates(device, product, memory, tuple(sources))


def _points(results: Sequence[Mapping[str, Any]], scheme: str) -> Mapping[str, Sequence[Measured]]:
    """Return the rates of each kernel of `scheme` that is not the reference, by number of rows, over all layers."""
    seconds: dict[tuple[str, float], float] = {}
    flop: dict[tuple[str, float], float] = {}
    for entry in results:
        if entry["scheme"] == scheme and entry["kernel"] != "reference":
            key = entry["kernel"], float(entry["m"])
            seconds[key] = seconds.get(key, 0.0) + entry["seconds"]["median"]
            flop[key] = flop.get(key, 0.0) + 2.0 * entry["m"] * entry["n"] * entry["k"]
    points: dict[str, list[Measured]] = {}
    for (kernel, rows), taken in seconds.items():
        points.setdefault(kernel, []).append(Measured(rows, flop[kernel, rows] / taken))
    return points
