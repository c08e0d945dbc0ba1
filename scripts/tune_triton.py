"""Times the Triton products on this GPU and writes the tables that choose their tiles.

    python scripts/tune_triton.py --output qarl/kernels/triton/tiles.json --minutes 30

For every operation and class of M the candidates run on the layer shapes below, each checked against the shipped tile
before it is timed; the one with the smallest geometric mean of time wins. For W4A16 the dequantized path runs too, and
the classes from which it wins for good are left out of the table: that is the ridge. Only this GPU's table changes.

Calls are timed by replays of CUDA graphs with cold caches (`qarl.bench.timing`), because an engine replays graphs, and
launches by Python take longer than products of few rows. `--processes` compile the candidates first: compiling takes
seconds, timing milliseconds.

A tile of an operation whose name ends in `_invariant` must give the bits of the shipped tile, splits no sum, and serves
any number of rows. So the classes of such a table may have different tiles, but a row has the same bits in all of them.

With --dry-run nothing is timed: prints how many candidates there are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources

from qarl.bench.timing import CpuClock, GpuClock
from qarl.kernels.int4_planes import BLOCK, to_pairs
from qarl.kernels.triton import experts as grouped
from qarl.kernels.triton import scaled_mm
from qarl.kernels.triton import tiles as tables
from qarl.kernels.triton.planes import to_planes
from qarl.kernels.triton.tiles import Tile
from qarl.kernels.triton.w4a16 import w4a16_backward_input
from qarl.kernels.triton.w4a16_forward import w4a16_linear

SHAPES = (
    (2048, 1536),
    (17920, 1536),
    (1536, 8960),
    (4608, 3584),
    (37888, 3584),
    (6144, 4096),
    (24576, 4096),
)
"""(N, K) of the fused linears of Qwen2.5-1.5B, Qwen2.5-7B and Qwen3-8B."""
EXPERT_SHAPES = ((128, 1536, 2048), (128, 2048, 768))
"""(E, N, K) of Qwen3-30B-A3B."""
CLASSES = (16, 32, 64, 128, 256, 512, 1024, 4096)
GROUP = 128
ROUNDS = 7
INVARIANT = "_invariant"
"""The end of the name of an operation whose sums have one order, whatever the number of rows."""


class Machine(NamedTuple):
    """Where the products run and how they are timed."""

    device: torch.device
    clock: CpuClock | GpuClock


Call = Callable[[Tile | None], torch.Tensor]
Measured = dict[Tile | None, float]


def candidates(operation: str, m: int) -> Iterator[Tile]:
    """Tiles worth a try for `m` rows: few, for each is compiled (about 2 s) before it is timed."""
    blocks = [block for block in (16, 32, 64, 128, 256) if block <= max(16, m)][-2:]
    whole_sums = operation.startswith("grouped") or operation.endswith(INVARIANT)
    per_sm = (0,) if whole_sums else (2, 4) if m <= 128 else (0, 1)
    backward = operation.removesuffix(INVARIANT).endswith("backward")
    wide, deep = (
        ((32, 64), (256,))
        if backward
        else ((64, 128, 256), (64, 128) if operation.startswith("grouped_w4a16") else (BLOCK,))
    )
    for rest in itertools.product(blocks, wide, deep, (4, 8), (3, 4), per_sm):
        tile = Tile(*rest)
        columns = tile.BK if backward else tile.BN
        if 16 <= tile.BM * columns // (32 * tile.num_warps) <= 128:
            yield tile


def make_call(operation: str, m: int, shape: tuple[int, ...], device: torch.device) -> Call:
    """The product on random operands; m rows, or m rows an expert."""
    *experts, n, k = shape
    rows = m * experts[0] if experts else m
    name = operation.removeprefix("grouped_").removesuffix(INVARIANT)
    more: tuple[torch.Tensor, ...] = ()
    if experts:
        more = ((torch.arange(1, experts[0] + 1, device=device) * m).to(torch.int32),)
    if name.startswith("w4a16"):
        packed = torch.randint(-(2**31), 2**31, (*experts, n, k // 8), device=device).to(
            torch.int32
        )
        scale = torch.rand(*experts, n, k // GROUP, device=device).bfloat16()
        backward = name.endswith("backward")
        x = torch.randn(rows, n if backward else k, device=device).bfloat16()
        many = grouped.grouped_w4a16_backward_input if backward else grouped.grouped_w4a16_linear
        if experts:
            return lambda tile: many(x, packed, scale, *more, tile=tile)
        if backward:
            return lambda tile: w4a16_backward_input(x, packed, scale, tile=tile)
        planes, pairs = to_planes(packed), to_pairs(scale)
        return lambda tile: w4a16_linear(x, planes, pairs, tile=tile)
    dtype = torch.int8 if name == "w8a8" else torch.float8_e4m3fn
    x = torch.randn(rows, k, device=device).mul(20).clamp(-127, 127).to(dtype)
    weight = torch.randn(*experts, n, k, device=device).mul(20).clamp(-127, 127).to(dtype)
    scales = torch.rand(rows, 1, device=device), torch.rand(*experts, n, 1, device=device)
    run: Any = grouped.grouped_scaled_mm if experts else scaled_mm.scaled_mm
    fast = name == "fp8_fast"
    return lambda tile: run(
        x, scales[0], weight, scales[1], *more, fast_accumulation=fast, tile=tile
    )


def measure(
    operation: str, call: Call, tile: Tile | None, expected: torch.Tensor, machine: Machine
) -> float:
    """Median seconds; infinite if the tile does not fit or its numbers are off."""
    try:
        if fault := wrong(call(tile), expected, exactly=operation.endswith(INVARIANT)):
            print(f"  {tile}: {fault}")
            return math.inf
        _, timer = machine.clock.timer(lambda: call(tile))
        return statistics.median(timer() for _ in range(ROUNDS))
    except OutOfResources:
        return math.inf
    except RuntimeError as error:
        print(f"  {tile}: {error}")
        return math.inf


def wrong(product: torch.Tensor, expected: torch.Tensor, *, exactly: bool) -> str | None:
    """Return what is wrong with a candidate's numbers, or None. `exactly`: whether every bit must be the same."""
    if exactly:
        differing = int((product != expected).sum())
        return f"{differing} of {expected.numel()} numbers have other bits" if differing else None
    error = float((product.float() - expected.float()).norm() / expected.float().norm())
    return None if error < 1e-2 else f"wrong numbers, relative error {error:.1e}"


def tried(operation: str, m: int, device: torch.device) -> list[Tile | None]:
    """Return the shipped tile, the dequantized path (None) if it may be chosen, and the candidates."""
    first = tables.choose(operation, device, m)
    tiles: list[Tile | None] = [
        first,
        *(tile for tile in candidates(operation, m) if tile != first),
    ]
    if "w4a16" in operation and first is not None and not operation.endswith(INVARIANT):
        tiles.insert(1, None)
    return tiles


def best(operation: str, m: int, deadline: float, machine: Machine) -> tuple[Tile | None, Measured]:
    """The winner over the shapes by geometric mean, None for the dequantized path; and the means in seconds.

    Candidates that are 1.5 times slower than the best on the first shape are not run on the others.
    """
    shapes = shapes_of(operation)
    logs: dict[Tile | None, list[float]] = {}
    alive = tried(operation, m, machine.device)
    always = alive[:2]
    for number, shape in enumerate(shapes):
        call = make_call(operation, m, shape, machine.device)
        expected = call(tables.choose(operation, machine.device, m))
        for tile in alive:
            if tile in always or time.monotonic() < deadline:
                seconds = measure(operation, call, tile, expected, machine)
                logs.setdefault(tile, []).append(math.log(seconds))
        alive = [tile for tile in alive if len(logs.get(tile, ())) == number + 1]
        fastest = min(logs[tile][-1] for tile in alive)
        alive = [tile for tile in alive if logs[tile][-1] < fastest + math.log(1.5)]
    means: Measured = {tile: math.exp(sum(logs[tile]) / len(logs[tile])) for tile in alive}
    return min(means, key=lambda tile: means[tile]), means


def shapes_of(operation: str) -> tuple[tuple[int, ...], ...]:
    return EXPERT_SHAPES if operation.startswith("grouped") else SHAPES


def compile_ahead(operations: Sequence[str], processes: int) -> None:
    """Fill Triton's cache with every candidate of these operations, in several processes on the GPU."""
    device = torch.device("cuda")
    work = [
        (operation, m, tile)
        for operation in operations
        for m in CLASSES
        for tile in tried(operation, m, device)
    ]
    start = time.monotonic()
    spawned = multiprocessing.get_context("spawn")  # a fork cannot use CUDA
    with ProcessPoolExecutor(processes, mp_context=spawned) as pool:
        list(pool.map(run_once, *zip(*work, strict=True), chunksize=4))
    print(f"compiled {len(work)} candidates: {time.monotonic() - start:.0f} s")


def run_once(operation: str, m: int, tile: Tile | None) -> None:
    """Run a candidate on the first shape. Whether it fits and is right is seen when it is measured."""
    try:
        make_call(operation, m, shapes_of(operation)[0], torch.device("cuda"))(tile)
    except (OutOfResources, RuntimeError):
        return


def rules(operation: str, deadline: float, machine: Machine) -> list[dict[str, Any]]:
    """The table of one operation, as JSON."""
    winners: list[tuple[int, Tile | None]] = []
    for m in CLASSES:
        tile, means = best(operation, m, deadline, machine)
        winners.append((m, tile))
        dequantized = f", dequantized {means[None] * 1e6:.1f} us" if None in means else ""
        print(
            f"{operation} M <= {m}: {tile} {means[tile] * 1e6:.1f} us{dequantized}, {len(means)} finished"
        )
        if tile is None:
            break
    table = [{"max_m": m, "tile": list(tile)} for m, tile in winners if tile is not None]
    if winners[-1][1] is not None:
        table[-1].pop("max_m")
    return [list(alike)[-1] for _, alike in itertools.groupby(table, key=lambda rule: rule["tile"])]


def dump(stored: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """A line a rule."""
    blocks = []
    for kind, operations in stored.items():
        lists = [
            f'  "{name}": [' + ",".join(f"\n   {json.dumps(rule)}" for rule in entries) + "]"
            for name, entries in operations.items()
        ]
        blocks.append(f' "{kind}": {{\n' + ",\n".join(lists) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main() -> None:
    stored = json.loads(tables.PATH.read_text(encoding="utf-8"))
    device = torch.device("cuda")
    kind = tables.architecture(device) if torch.cuda.is_available() else "hopper"
    operations = [name for name, entries in stored[kind].items() if entries]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", nargs="+", choices=operations, default=operations)
    parser.add_argument(
        "--output", type=Path, help="where to write the tables; without it they are printed"
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="in all; when they run out, less is tried"
    )
    parser.add_argument(
        "--processes", type=int, default=8, help="that compile before anything is timed; 0 for none"
    )
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if arguments.dry_run:
        for name in arguments.operations:
            print(name, {m: sum(1 for _ in candidates(name, m)) for m in CLASSES})
        return
    if not torch.cuda.is_available():
        parser.error("tuning needs a GPU")
    start = time.monotonic()
    if arguments.processes:
        compile_ahead(arguments.operations, arguments.processes)
    machine = Machine(device, GpuClock(device))
    share = arguments.minutes * 60 / len(arguments.operations)
    for number, name in enumerate(arguments.operations):
        stored[kind][name] = rules(name, start + share * (number + 1), machine)
        if arguments.output:
            arguments.output.write_text(dump(stored), encoding="utf-8")
    print(
        f"{torch.cuda.get_device_name()}, triton {triton.__version__}: {time.monotonic() - start:.0f} s"
    )
    if not arguments.output:
        print(dump(stored))


if __name__ == "__main__":
    main()
