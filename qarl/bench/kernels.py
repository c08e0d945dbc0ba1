"""`qarl bench kernels`: seconds of single products and quantizers, for every kernel that works here and for BF16.

python -m qarl.bench kernels                                       everything, on the GPU if there is one
python -m qarl.bench kernels model=Qwen3-8B m=1,4096 json=FILE.json
python -m qarl.bench kernels device=cpu threads=1                  a 1024 -> 3072 layer on the CPU
python -m qarl.bench kernels model=Qwen3-30B-A3B operation=experts

A kernel that fails or gives wrong numbers gets no figure, and the exit code is 1.

A line shows two shares, because arithmetic or memory may be the limit: FLOP/s relative to a large BF16 product on this
machine, and bytes/s relative to a copy. 8-bit tensor cores can reach twice the FLOP/s of BF16.

Calls take turns, so that a change in the machine's speed affects all equally. On a GPU they are timed by replays of
CUDA graphs with cold caches, on a CPU by the clock (`qarl.bench.timing`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from qarl.bench import report
from qarl.bench.arguments import as_json, check_device
from qarl.bench.kernel_arguments import Arguments
from qarl.checkpoint.storage import write_json

if TYPE_CHECKING:
    import torch

    from qarl.bench.competitors import Competitor, Group

KEYS = Arguments


def run(arguments: Arguments) -> int:
    """Measure, print, write, and return the exit code."""
    import torch

    from qarl.bench.kernel_cases import groups

    check_device(arguments.device)
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    torch.manual_seed(0)
    tops = ceilings(device)
    print(f"{report.device_name(device)}: copy {tops['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
          f"BF16 product {tops['bf16_flop_per_s'] / 1e12:.1f} TFLOP/s")  # fmt: skip
    document = report.facts(device) | {"benchmark": "kernels", "arguments": as_json(arguments)}
    document |= {"ceilings": tops, "results": [], "not_measured": {}}
    with torch.no_grad():
        for group in groups(arguments, device):
            document["results"] += _measure(group, device, arguments, document)
            if arguments.json:  # after every group, so that Ctrl-C or a crash loses nothing
                write_json(arguments.json, document)
    for name, why in document["not_measured"].items():
        print(f"not measured: {name}: {why}", file=sys.stderr)
    return 1 if document["not_measured"] else 0


def _measure(
    group: Group, device: torch.device, arguments: Arguments, document: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the results of competitors with correct numbers. For the others, write the reason to `document`."""
    correct = {}
    for competitor in group.competitors:
        why = competitor.wrong()
        if why is None:
            correct[competitor.name] = competitor
        elif why:
            document["not_measured"][f"{group.label}: {competitor.name}"] = why
    if not correct:
        return []
    from qarl.bench.timing import measure

    calls = {name: competitor.call for name, competitor in correct.items()}
    times = measure(calls, device, seconds=arguments.seconds, rounds=arguments.rounds)
    results = {}
    for name, competitor in correct.items():
        entry = _entry(competitor, times[name], document["ceilings"])
        results[name] = group.keys | entry
    for name, entry in results.items():
        baselines = ("bf16 bf16", f"{entry['scheme']} pytorch")
        base = next((base for base in baselines if base in results), None)
        entry["baseline"] = base
        entry["speedup"] = times[base]["median"] / times[name]["median"] if base else None
        print(report.kernel_line(group.label, entry))
    return list(results.values())


def _entry(
    competitor: Competitor, times: dict[str, float], tops: dict[str, float]
) -> dict[str, Any]:
    flop_per_s = competitor.flop / times["median"]
    bytes_per_s = competitor.bytes_moved / times["median"]
    return {
        "scheme": competitor.scheme,
        "kernel": competitor.kernel,
        "seconds": times,
        "tflop_per_s": flop_per_s / 1e12 or None,
        "gb_per_s": bytes_per_s / 1e9,
        "share_of_bf16_product": flop_per_s / tops["bf16_flop_per_s"] or None,
        "share_of_copy": bytes_per_s / tops["copy_bytes_per_s"],
    }


def ceilings(device: torch.device) -> dict[str, float]:
    """Measure the machine's peak rates: bytes/s of a copy (reads plus writes), and FLOP/s of a large BF16 product."""
    import torch

    from qarl.bench.timing import measure

    on_gpu = device.type == "cuda"
    size, side = (2**30, 8192) if on_gpu else (2**26, 1024)
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(side, side, device=device).bfloat16()
    b = torch.randn(side, side, device=device).bfloat16()
    calls = {"copy": lambda: target.copy_(source), "product": lambda: a @ b}
    times = measure(calls, device, seconds=1.0 if on_gpu else 0.5, rounds=10)
    bytes_per_s = 2 * size / times["copy"]["median"]
    flop_per_s = 2 * side**3 / times["product"]["median"]
    return {"copy_bytes_per_s": bytes_per_s, "bf16_flop_per_s": flop_per_s}
