"""`python -m qarl.bench kernels`: measure, print a line per result, and write the file after every group.

All kernels that work on this machine compete with BF16, and with gemlite if it is installed. A kernel that fails or
gives wrong numbers gets no figure, and the exit code is 1.

A line shows two shares, because arithmetic or memory may be the limit: FLOP/s relative to a large BF16 product on this
machine, and bytes/s relative to a copy. 8-bit tensor cores can reach twice the FLOP/s of BF16.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from qarl.bench import report
from qarl.bench.arguments import as_json, check_device
from qarl.bench.kernels import dense, experts, tables
from qarl.bench.kernels.arguments import Arguments
from qarl.bench.kernels.competitor import Competitor
from qarl.bench.kernels.timing import Times, ceilings, measure
from qarl.checkpoint.json_file import write_json
from qarl.kernels.experts.autograd import ExpertsShape


class Group(NamedTuple):
    """Competitors for the same work, which `keys` describes."""

    keys: dict[str, Any]
    competitors: list[Competitor]

    @property
    def place(self) -> str:
        keys = self.keys
        rows = f" m={keys['m']}" if keys["m"] else ""
        return f"{keys['model']} {keys['layer']} {keys['n']}x{keys['k']} {keys['operation']}{rows}"


@torch.no_grad()
def run(arguments: Arguments) -> int:
    """Measure, print, write, and return the exit code."""
    check_device(arguments.device)
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    torch.manual_seed(0)
    tops = ceilings(device)
    print(f"{report.device_name(device)}: copy {tops['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
          f"BF16 product {tops['bf16_flop_per_s'] / 1e12:.1f} TFLOP/s")  # fmt: skip
    document = report.facts(device) | {"benchmark": "kernels", "arguments": as_json(arguments), "ceilings": tops}
    document |= {"results": [], "not_measured": {}}
    for group in itertools.chain(_dense(arguments, device, document), _experts(arguments, device, document)):
        document["results"] += _measure(group, device, arguments, document)
        if arguments.json:  # after every group, so that Ctrl-C or a crash loses nothing
            write_json(arguments.json, document)
    if arguments.json:  # again, because the last layer may have added failures
        write_json(arguments.json, document)
    for name, why in document["not_measured"].items():
        print(f"not measured: {name}: {why}", file=sys.stderr)
    return 1 if document["not_measured"] else 0


def _dense(arguments: Arguments, device: torch.device, document: dict[str, Any]) -> Iterator[Group]:
    operations = [operation for operation in arguments.operation if operation in dense.BUILDERS]
    for model, name, (n, k) in arguments.layers() if operations else ():
        layer = dense.Layer((torch.randn(n, k, device=device) / k**0.5).bfloat16(), arguments)
        for operation in operations:
            for rows in (0,) if operation == "quantize" else arguments.m:
                keys = {"operation": operation, "model": model, "layer": name, "n": n, "k": k, "m": rows}
                yield Group(keys, dense.BUILDERS[operation](layer, rows))
        document["not_measured"] |= {f"{model} {name} {n}x{k}: {key}": why for key, why in layer.failures.items()}


def _experts(arguments: Arguments, device: torch.device, document: dict[str, Any]) -> Iterator[Group]:
    """Yield the groups of expert layers. `n` and `k` are the sizes of one expert's weight."""
    for model, numbers in arguments.expert_layers():
        layer = experts.ExpertLayer(ExpertsShape(*numbers), arguments, device)
        hidden = layer.shape.hidden
        for operation, build in experts.BUILDERS.items():
            parts = ("layer",) if operation == "experts" else tuple(layer.weights)
            chosen = parts if operation in arguments.operation else ()
            for part, tokens, routing in itertools.product(chosen, arguments.m, experts.ROUTINGS):
                n, k = (hidden, hidden) if part == "layer" else layer.weights[part].shape[1:]
                keys = {"operation": operation, "model": model, "layer": f"experts_{part}, {routing}"}
                yield Group(keys | {"n": n, "k": k, "m": tokens}, build(layer, part, tokens, routing))
        document["not_measured"] |= {f"{model} experts: {name}": why for name, why in layer.failures.items()}


def _measure(
    group: Group, device: torch.device, arguments: Arguments, document: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the results of competitors with correct numbers. For the others, write the reason to `document`."""
    wrong = {competitor.name: competitor.wrong() for competitor in group.competitors}
    document["not_measured"] |= {f"{group.place}: {name}": why for name, why in wrong.items() if why}
    good = {competitor.name: competitor for competitor in group.competitors if wrong[competitor.name] is None}
    if not good:
        return []
    calls = {name: competitor.call for name, competitor in good.items()}
    times = measure(calls, device, seconds=arguments.seconds, rounds=arguments.rounds)
    results = {name: group.keys | _entry(one, times[name], document["ceilings"]) for name, one in good.items()}
    for name, entry in results.items():
        base = next((base for base in ("bf16 bf16", f"{entry['scheme']} pytorch") if base in results), None)
        entry["baseline"] = base
        entry["speedup"] = times[base].median / times[name].median if base else None
        print(tables.line(group.place, entry))
    return list(results.values())


def _entry(competitor: Competitor, times: Times, tops: dict[str, float]) -> dict[str, Any]:
    flop_per_s, bytes_per_s = competitor.flop / times.median, competitor.bytes_moved / times.median
    return {
        "scheme": competitor.scheme,
        "kernel": competitor.kernel,
        "seconds": dataclasses.asdict(times),
        "tflop_per_s": flop_per_s / 1e12 or None,
        "gb_per_s": bytes_per_s / 1e9,
        "share_of_bf16_product": flop_per_s / tops["bf16_flop_per_s"] or None,
        "share_of_copy": bytes_per_s / tops["copy_bytes_per_s"],
    }
