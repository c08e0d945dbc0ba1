"""Which products of one GPU share an order of summation, and what they cost: a part of scripts/gpu_check.py.

    python scripts/gpu_probe.py [--cpu] [--seconds 90]

It decides the open questions of docs/lookup/results/gpu.md. On Hopper a row's bits should depend on the order of its
sum over K alone, not on the tile, the number of rows or the library, unless the sum is split:

    cublas   for which weights and numbers of rows a BF16 product has the bits of one with 4096 rows
    tiles    whether the W4A16 kernel has the same bits with any tile, and those of cuBLAS on the dequantized weight
    machete  the same for every schedule of Machete, where CUTLASS's rule says that a sum is whole, and where not
    lm_head  whether lm_head's product of a tokenizer's 151,665 columns has the bits of all 151,936, and how long both
             take, with their gradients
    times    what each of these costs, by replays of CUDA graphs

A share is that of the outputs that differ from cuBLAS with 4096 rows on the dequantized BF16 weight: 0 means the bits
of a trainer that dequantizes once and calls cuBLAS. A question that raises an error leaves the others their answers. Of
vLLM only one library and one module are needed, not its dependencies. With --cpu sizes are small, and Triton's
interpreter runs the kernel. Nothing of this has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from qarl.bench.report import facts
from qarl.bench.timing import measure
from qarl.kernels.base import PreparedWeight
from qarl.kernels.cuda.machete_schedules import SCHEDULES, plan, whole
from qarl.kernels.int4_planes import to_pairs
from qarl.kernels.triton.planes import to_planes
from qarl.kernels.triton.quantize import dequantize_int4, quantize_int4
from qarl.kernels.triton.tiles import Tile
from qarl.kernels.triton.w4a16_forward import w4a16_linear

GROUP = 128
REFERENCE_ROWS = 4096


class Sizes(NamedTuple):
    """What is compared: weights [N, K] by name, numbers of rows, tiles by the most rows that they serve, columns of
    lm_head of the tokenizer and of the model, and its K; and what is timed."""

    weights: dict[str, tuple[int, int]]
    rows: Sequence[int]
    tiles: dict[int, Sequence[Tile]]
    machete_rows: Sequence[int]
    vocabulary: tuple[int, int]
    heads: dict[str, int]
    head_rows: int
    timed: Sequence[str]
    timed_rows: Sequence[int]


GPU = Sizes(
    weights={
        "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B k": (1024, 4096), "8B gate_up": (24576, 4096),
        "8B gate": (12288, 4096), "8B down": (4096, 12288), "1.5B qkv": (2048, 1536), "1.5B down": (1536, 8960),
        "0.5B qkv": (1152, 896), "0.5B down": (896, 4864),
    },
    rows=(1, 2, 7, 8, 16, 17, 32, 33, 64, 65, 128, 256, 512, 1024, 2048),
    tiles={
        16: (Tile(16, 128, 128, 4, 4), Tile(16, 64, 128, 4, 5), Tile(16, 128, 128, 4, 6)),
        64: (Tile(64, 128, 128, 4, 3), Tile(64, 64, 128, 4, 4), Tile(32, 128, 128, 4, 4)),
        4096: (Tile(128, 128, 128, 8, 3), Tile(256, 128, 128, 8, 3), Tile(128, 256, 128, 8, 3)),
    },
    machete_rows=(1, 16, 48, 64, 160, 256, 512, 2048, 4096),
    vocabulary=(151_665, 151_936),
    heads={"0.6B": 1024, "8B": 4096},
    head_rows=2048,
    timed=("8B gate", "8B down", "8B o", "1.5B down"),
    timed_rows=(1, 16, 64, 256, 512, 4096, 16384),
)  # fmt: skip
CPU = Sizes(
    weights={"small": (64, 256)},
    rows=(1, 2, 7, 16),
    tiles={16: (Tile(16, 32, 128), Tile(16, 16, 128)), 32: (Tile(32, 32, 128),)},
    machete_rows=(1, 16),
    vocabulary=(233, 256),
    heads={"small": 64},
    head_rows=32,
    timed=("small",),
    timed_rows=(1, 16),
)


class Weight(NamedTuple):
    """A random weight: int4 codes with BF16 scales, as Triton's kernel reads them, and the BF16 weight they mean."""

    packed: torch.Tensor
    scale: torch.Tensor
    planes: PreparedWeight
    dequantized: torch.Tensor


class Probe:
    """Asks the questions one after another. `deadline`: when no more times are taken, by `time.monotonic`."""

    def __init__(self, sizes: Sizes, device: torch.device, deadline: float) -> None:
        self.sizes = sizes
        self.device = device
        self.deadline = deadline
        self.reference_rows = max(
            *sizes.rows, *sizes.tiles, REFERENCE_ROWS if device.type == "cuda" else 0
        )

    def weight(self, name: str) -> Weight:
        n, k = self.sizes.weights[name]
        dense = torch.randn(n, k, device=self.device).bfloat16() / k**0.5
        packed, scale, _ = quantize_int4(dense, GROUP)
        planes = PreparedWeight(to_planes(packed), to_pairs(scale))
        return Weight(packed, scale, planes, dequantize_int4(packed, scale))

    def inputs(self, rows: int, k: int) -> torch.Tensor:
        return torch.randn(rows, k, device=self.device).bfloat16()

    def questions(self) -> dict[str, Callable[[], Any]]:
        return {
            "cublas": self.cublas,
            "tiles": self.tiles,
            "machete": self.machete,
            "lm_head": self.lm_head,
            "times": self.times,
        }

    def cublas(self) -> dict[str, dict[str, float]]:
        """Return the shares by weight and number of rows."""
        found = {}
        for name, (_, k) in self.sizes.weights.items():
            weight = self.weight(name).dequantized
            x = self.inputs(self.reference_rows, k)
            expected = F.linear(x, weight)
            found[name] = {
                str(rows): share(F.linear(x[:rows], weight), expected) for rows in self.sizes.rows
            }
            say(f"cuBLAS {name}", found[name])
        return found

    def tiles(self) -> dict[str, dict[str, float]]:
        """Return the shares by weight and tile."""
        found = {}
        for name, (_, k) in self.sizes.weights.items():
            weight = self.weight(name)
            x = self.inputs(self.reference_rows, k)
            expected = F.linear(x, weight.dequantized)
            first: torch.Tensor | None = None
            shares: dict[str, float] = {}
            for rows, tiles in self.sizes.tiles.items():
                for tile in tiles:
                    y = w4a16_linear(x[:rows], *weight.planes, tile=tile)
                    first = y if first is None else first
                    common = min(len(first), len(y))
                    shares[f"{list(tile)} against cuBLAS"] = share(y, expected)
                    shares[f"{list(tile)} against the first tile"] = share(y[:common], first)
            found[name] = shares
            say(f"Triton {name}", shares)
        return found

    def machete(self) -> dict[str, dict[str, float]]:
        """Return the shares by weight, schedule and number of rows, and by whether CUTLASS's rule keeps sums whole."""
        multiply = Machete()
        found = {}
        for name, (n, k) in self.sizes.weights.items():
            weight = self.weight(name)
            prepared = multiply.prepare(weight)
            x = self.inputs(self.reference_rows, k)
            expected = F.linear(x, weight.dequantized)
            shares: dict[str, float] = {}
            for schedule in (each for each in SCHEDULES if n % each.channels == 0):
                for rows in self.sizes.machete_rows:
                    kind = "whole" if whole(n, k, rows, schedule) else "split"
                    y = multiply(x[:rows], prepared, schedule.name)
                    shares[f"{kind} {schedule.name} m={rows}"] = share(y, expected)
            found[name] = shares
            for kind in ("whole", "split"):
                of_kind = [value for label, value in shares.items() if label.startswith(kind)]
                if of_kind:
                    print(
                        f"Machete {name}, {kind}: {min(of_kind):.1e} to {max(of_kind):.1e} in {len(of_kind)} calls"
                    )
        return found

    def lm_head(self) -> dict[str, dict[str, Any]]:
        """Return, by model, the share of logits that differ, and the seconds of both products and their gradients."""
        fewer, whole_vocabulary = self.sizes.vocabulary
        found: dict[str, dict[str, Any]] = {}
        for name, k in self.sizes.heads.items():
            weight = torch.randn(whole_vocabulary, k, device=self.device).bfloat16() / k**0.5
            x = self.inputs(self.sizes.head_rows, k)
            part = weight[:fewer]
            expected = F.linear(x, weight)[:, :fewer]
            answer: dict[str, Any] = {
                "share": share(F.linear(x, part).contiguous(), expected.contiguous())
            }
            for columns, used in ((fewer, part), (whole_vocabulary, weight)):
                grad = torch.randn(len(x), columns, device=self.device).bfloat16()
                calls: dict[str, Callable[[], object]] = {
                    "forward": partial(F.linear, x, used),
                    "dX": partial(torch.mm, grad, used),
                    "dW": partial(torch.mm, grad.t(), x),
                }
                answer[str(columns)] = self.seconds(calls)
            found[name] = answer
            print(f"lm_head {name}: {json.dumps(answer)}")
        return found

    def times(self) -> dict[str, dict[str, float]]:
        """Return seconds by weight and number of rows, as far as there is time."""
        found = {}
        for name, rows in (
            (name, rows) for rows in self.sizes.timed_rows for name in self.sizes.timed
        ):
            if time.monotonic() > self.deadline:
                print(f"no time is left for {name} m={rows} and what follows")
                break
            seconds = self.seconds(dict(self.calls(name, rows)))
            found[f"{name} m={rows}"] = seconds
            base = seconds["bf16"]
            others = ", ".join(
                f"{what} {base / s:.2f}x" for what, s in seconds.items() if what != "bf16" and s
            )
            print(f"{name} m={rows}: bf16 {base * 1e6:.1f} us; {others}")
        return found

    def calls(self, name: str, rows: int) -> Iterator[tuple[str, Callable[[], object]]]:
        n, k = self.sizes.weights[name]
        weight = self.weight(name)
        x = self.inputs(rows, k)
        yield "bf16", lambda: F.linear(x, weight.dequantized)
        yield (
            "dequantize and cuBLAS",
            lambda: F.linear(x, dequantize_int4(weight.packed, weight.scale)),
        )
        most = next((most for most in self.sizes.tiles if rows <= most), max(self.sizes.tiles))
        for tile in self.sizes.tiles[most]:
            yield (
                str(list(tile)),
                partial(w4a16_linear, x, *weight.planes, tile=tile),
            )
        if self.device.type == "cuda" and library() is not None:
            multiply = Machete()
            prepared = multiply.prepare(weight)
            call = plan(n, k, rows)
            wide = F.pad(x, (0, 0, 0, call.rows - rows))
            yield "machete", lambda: multiply(x, prepared)
            yield (
                f"machete whole, {call.schedule}, {call.rows} rows",
                lambda: multiply(wide, prepared, call.schedule),
            )

    def seconds(self, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        times = measure(calls, self.device, seconds=0.02, rounds=3)
        return {name: value["median"] for name, value in times.items()}


class Machete:
    """Machete's operators without vLLM's packages: of vLLM one library and one module."""

    def __init__(self) -> None:
        folder = library()
        if folder is None:
            raise RuntimeError("there is no vLLM with CUDA operators on the path")
        torch.ops.load_library(str(folder / "_C_stable_libtorch.abi3.so"))
        self.kind = _scalar_types(folder).uint4b8.id
        self.operators = torch.ops._C

    def prepare(self, weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
        packed = self.operators.machete_prepack_B(
            weight.packed.t(), torch.bfloat16, self.kind, torch.bfloat16
        )
        return packed, weight.scale.t().contiguous()

    def __call__(
        self,
        x: torch.Tensor,
        prepared: tuple[torch.Tensor, torch.Tensor],
        schedule: str | None = None,
    ) -> torch.Tensor:
        packed, scale = prepared
        group = x.shape[1] // scale.shape[0]
        y: torch.Tensor = self.operators.machete_mm(
            x, packed, self.kind, None, scale, None, group, None, None, schedule
        )
        return y


def library() -> Path | None:
    """Return the folder of a vLLM for CUDA on the path, without importing it."""
    spec = importlib.util.find_spec("vllm")
    for folder in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
        if (folder / "_C_stable_libtorch.abi3.so").is_file():
            return folder
    return None


def _scalar_types(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("vllm_scalar_type", folder / "scalar_type.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.scalar_types


def share(y: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the share of the outputs y that are not those of the first rows of `expected`."""
    return float((y != expected[: len(y)]).float().mean())


def say(what: str, shares: dict[str, float]) -> None:
    different = {label: f"{value:.1e}" for label, value in shares.items() if value}
    print(f"{what}: {different or 'the same bits everywhere'}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="small sizes, in Triton's interpreter")
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="after which no more times are taken"
    )
    args = parser.parse_args(argv)
    device = torch.device("cpu" if args.cpu else "cuda:0")
    torch.manual_seed(0)
    probe = Probe(CPU if args.cpu else GPU, device, time.monotonic() + args.seconds)
    report: dict[str, Any] = facts(device) | {"shares": {}, "errors": {}}
    file = os.environ.get("QARL_GPU_CHECK_REPORT")
    for name, question in probe.questions().items():
        start = time.monotonic()
        try:
            report["shares"][name] = question()
        except Exception as error:  # the other questions must still be answered
            report["errors"][name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {report['errors'][name]}")
        print(f"{name}: {time.monotonic() - start:.0f} s")
        if file:
            Path(file).write_text(json.dumps(report))
    expected = {"machete"} if args.cpu else set()
    return int(bool(report["errors"].keys() - expected))


if __name__ == "__main__":
    sys.exit(main())
