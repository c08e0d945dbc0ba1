"""`python -m qarl.bench kernels`: achieved TFLOP/s and GB/s of the low-bit kernels, as shares of measured ceilings.

    python -m qarl.bench kernels                                       everything, on the GPU if there is one
    python -m qarl.bench kernels model=qwen3-8b m=1,4096 json=FILE.json plot=FILE.png
    python -m qarl.bench kernels device=cpu threads=1                  a 1024 -> 3072 layer, 8 experts, on the CPU
    python -m qarl.bench kernels model=qwen3-30b-a3b operation=grouped_linear,experts

Keys: `qarl.bench.arguments.Arguments`. All kernels that can serve here compete with BF16, and with gemlite and torchao
where they are installed, call by call in turn (`qarl.bench.timing`). Each is first compared with float64: one that is
wrong, or fails, gets no figure, and the exit code is 1. Products are bound by arithmetic or by memory, so both shares
are given: FLOP/s of the ceiling of a large BF16 product, and needed bytes/s of the ceiling of a copy. 8-bit tensor
cores have twice that first ceiling.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from qarl.bench import grouped, report
from qarl.bench.arguments import Arguments
from qarl.bench.competitors import BASELINE, BUILDERS, Competitor, Layer
from qarl.bench.timing import Times, ceilings, measure
from qarl.errors import UserError


@torch.no_grad()
def run(arguments: Arguments) -> int:
    """Measure, print, write; the exit code."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU", where="device", fix="device=cpu")
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    torch.manual_seed(0)
    tops = ceilings(device)
    print(f"{report.device_name(device)}: copy {tops['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
          f"BF16 product {tops['bf16_flop_per_s'] / 1e12:.1f} TFLOP/s")  # fmt: skip
    results: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    if not arguments.layers() and not arguments.experts():
        raise UserError("no layer is left to measure", where="layer", fix="name layers of the models given")
    for found, wrong in itertools.chain(_dense(arguments, device, tops), _experts(arguments, device, tops)):
        results += found
        failures |= wrong
        document = report.document(arguments, device, tops, results, failures)
        if arguments.json:  # after every layer: what was measured before a crash or a time limit is kept
            report.write_json(arguments.json, document)
    for name, why in failures.items():
        print(f"not measured: {name}: {why}", file=sys.stderr)
    if arguments.plot:
        report.plot(arguments.plot, document)
    return 1 if failures else 0


Measured = tuple[list[dict[str, Any]], dict[str, str]]


def _dense(arguments: Arguments, device: torch.device, tops: dict[str, float]) -> Iterator[Measured]:
    """Results and failures, layer by layer."""
    operations = [operation for operation in arguments.operation if operation in BUILDERS]
    for model, shape in arguments.layers() if operations else ():
        weight = (torch.randn(shape.n, shape.k, device=device) / shape.k**0.5).bfloat16()
        where = f"{model} {shape.name} {shape.n}x{shape.k}"
        layer = Layer(weight, arguments, {})
        results: list[dict[str, Any]] = []
        failures: dict[str, str] = {}
        for operation in operations:
            for rows in (0,) if operation == "quantize" else arguments.m:
                place = f"{where} {operation}" + f" m={rows}" * bool(rows)
                found, wrong = _measure(place, BUILDERS[operation](layer, rows), operation, device, arguments, tops)
                keys = {"operation": operation, "model": model, "layer": shape.name, "n": shape.n, "k": shape.k}
                results += [keys | {"m": rows} | entry for entry in found]
                failures |= wrong
        yield results, failures | {f"{where}: {name}": why for name, why in layer.failures.items()}


def _experts(arguments: Arguments, device: torch.device, tops: dict[str, float]) -> Iterator[Measured]:
    """The same of models with experts, operation by operation; `n` and `k` are those of one expert's weight."""
    operations = [operation for operation in arguments.operation if operation in grouped.BUILDERS]
    for model, shape in arguments.experts():
        layer = grouped.ExpertLayer(shape, arguments, device)
        for operation in operations:
            results: list[dict[str, Any]] = []
            failures: dict[str, str] = {}
            parts = ("layer",) if operation == "experts" else tuple(layer.weights)
            for part, tokens, routing in itertools.product(parts, arguments.m, grouped.ROUTINGS):
                n, k = (shape.hidden, shape.hidden) if part == "layer" else layer.weights[part].shape[1:]
                name = f"experts_{part}, {routing}"
                place = f"{model} {name} {shape.experts}x{n}x{k} {operation} m={tokens}"
                competitors = grouped.BUILDERS[operation](layer, part, tokens, routing)
                found, wrong = _measure(place, competitors, operation, device, arguments, tops)
                keys = {"operation": operation, "model": model, "layer": name, "n": n, "k": k, "m": tokens}
                results += [keys | entry for entry in found]
                failures |= wrong
            yield results, failures | {f"{model} experts: {name}": why for name, why in layer.failures.items()}


def _measure(
    place: str,
    competitors: list[Competitor],
    operation: str,
    device: torch.device,
    arguments: Arguments,
    tops: dict[str, float],
) -> Measured:
    """Results of those whose numbers are right, and why the others have none."""
    good: dict[str, tuple[Competitor, float]] = {}
    failures: dict[str, str] = {}
    for competitor in competitors:
        name = f"{place}: {competitor.name}"
        try:
            error = competitor.error()
        except (RuntimeError, ValueError, TypeError) as raised:  # a kernel that does not compile or launch
            failures[name] = f"{type(raised).__name__}: {raised}"
            continue
        if error <= competitor.allowed:
            good[competitor.name] = competitor, error
        else:
            failures[name] = f"its result is off by {error:.2e}, {competitor.allowed:.0e} is allowed"
    if not good:
        return [], failures
    times = measure(
        {name: competitor.call for name, (competitor, _) in good.items()},
        device,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
    )
    results = [_entry(competitor, error, times[name], tops) for name, (competitor, error) in good.items()]
    by_name = {(entry["scheme"], entry["kernel"]): entry for entry in results}
    for entry in results:
        base = _baseline(entry, by_name, BASELINE[operation])
        entry["baseline"] = f"{base['scheme']} {base['kernel']}" if base else None
        entry["speedup"] = base["seconds"]["median"] / entry["seconds"]["median"] if base else None
        print(report.line(place, entry))
    return results, failures


def _baseline(
    entry: dict[str, Any], by_name: dict[tuple[str, str], dict[str, Any]], baseline: str
) -> dict[str, Any] | None:
    """BF16 where it takes part, else the eager one in the same scheme: doing the same (", with ...") where it does."""
    _, comma, fused = entry["kernel"].partition(",")
    names = [("bf16", baseline), (entry["scheme"], baseline + comma + fused), (entry["scheme"], baseline)]
    return next((by_name[name] for name in names if name in by_name), None)


def _entry(competitor: Competitor, error: float, times: Times, tops: dict[str, float]) -> dict[str, Any]:
    flop_per_s, bytes_per_s = competitor.flop / times.median, competitor.bytes_moved / times.median
    return {
        "scheme": competitor.scheme,
        "kernel": competitor.kernel,
        "seconds": dataclasses.asdict(times),
        "tflop_per_s": flop_per_s / 1e12 or None,
        "gb_per_s": bytes_per_s / 1e9,
        "share_of_bf16_product": flop_per_s / tops["bf16_flop_per_s"] or None,
        "share_of_copy": bytes_per_s / tops["copy_bytes_per_s"],
        "error": error,
        "error_allowed": competitor.allowed,
    }
