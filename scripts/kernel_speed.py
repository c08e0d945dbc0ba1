"""Forward time of every low-bit linear kernel on this CPU, as a ratio to BF16 `torch.nn.functional.linear`.

    python scripts/kernel_speed.py                        a 1024 -> 3072 layer, 64, 512 and 4096 rows, one thread

All kernels that can serve a scheme here run in turn, call by call, so that a machine whose speed drifts slows all;
a cell is the ratio of medians and, in brackets, of minima. Preparing the weight is not counted: it happens once per
optimizer step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from qarl.kernels.registry import LINEAR_KERNELS
from qarl.quant import get_scheme, quantize


def candidates(weight: torch.Tensor, x: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Name -> one forward of `x`, for BF16 and every kernel that serves its scheme here."""
    calls: dict[str, Callable[[], torch.Tensor]] = {"bf16 F.linear": lambda: F.linear(x, weight)}
    for scheme, kernels in LINEAR_KERNELS.items():
        tensors = quantize(weight, get_scheme(scheme)).tensors
        for kernel in kernels:
            if kernel.unavailable(scheme, weight.device, (weight.shape[0], weight.shape[1])) is None:
                prepared = kernel.prepare(tensors)
                calls[f"{scheme} {kernel.name}"] = lambda k=kernel, p=prepared: k.linear(x, p, None)
    return calls


def measure(calls: dict[str, Callable[[], torch.Tensor]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each call, in turn, for about `seconds` in all and at least three rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(times["bf16 F.linear"]) < 3:
        for name, call in calls.items():
            before = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - before)
    return times


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 512, 4096])
    parser.add_argument("--in-features", type=int, default=1024)
    parser.add_argument("--out-features", type=int, default=3072)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each number of rows")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    weight = torch.randn(args.out_features, args.in_features).bfloat16()
    table: dict[str, list[str]] = {}
    for rows in args.rows:
        times = measure(candidates(weight, torch.randn(rows, args.in_features).bfloat16()), args.seconds)
        reference = times["bf16 F.linear"]
        for name, values in times.items():
            medians = statistics.median(values) / statistics.median(reference)
            cell = f"{medians:.2f} ({min(values) / min(reference):.2f})"
            if values is reference:
                cell = f"{statistics.median(values) * 1e3:.2f} ms"
            table.setdefault(name, []).append(cell)
    print("| kernel | " + " | ".join(f"M={rows}" for rows in args.rows) + " |")
    print("|---" * (len(args.rows) + 1) + "|")
    for name, cells in table.items():
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
