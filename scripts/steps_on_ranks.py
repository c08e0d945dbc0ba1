"""30 training steps on 1, 2 and 4 gloo ranks from one seed: what each step publishes, and why it can differ.

    python scripts/steps_on_ranks.py --output benchmarks/results/steps_on_ranks_cpu.json

The models of low_bit_gather.py, dense and a mixture of experts, in each scheme, with FSDP2. AdamW at 1e-4 trains them
on fixed rows of 24 tokens, which the ranks share, one row a micro-batch. After each step the tensors of a publish are
gathered, and digested.

    shared      four rows on 1, 2 and 4 ranks, gradients clipped to norm 1
    unclipped   the same without clipping. The norm is the only sum over all elements of a gradient, and each number of
                ranks adds them in another order, so clipping scales every gradient by another rounding of one number
    reordered   the rows of `shared` in another order, on one rank: a gradient's sum over rows in another order
    pair        two rows on 1 and 2 ranks, without clipping: a sum of two terms has only one order

Each run is compared with the run of the same rows on one rank: the first step at which the digests differ, the largest
difference of a gradient in the first step (relative to the largest element of its tensor), and, at the last step, the
shares of codes and scales that differ and by how many steps of the grid a code differs at most. `moved` is the share of
codes that the training itself changed. The file keeps the kinds and schemes that are not measured again. verl_ranks.py
measures the mismatch on 1, 2 and 4 ranks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from low_bit_gather import GROUP, IGNORE, KINDS, SCHEMES, build, digest, loss_of, rows

from qarl.checkpoint.json_file import write_json
from qarl.metrics.tracker import write_versions
from qarl.quant import get_scheme
from qarl.quant.fsdp import quantize_shards, sharded_wire_tensors

STEPS, LENGTH, LR = 30, 24, 1e-4
ORDERS = {"shared": [0, 1, 2, 3], "reordered": [3, 1, 0, 2], "unclipped": [0, 1, 2, 3], "pair": [0, 1]}
CLIPPED = {"shared", "reordered"}
WORLDS = {
    1: ("shared", "reordered", "unclipped", "pair"),
    2: ("shared", "unclipped", "pair"),
    4: ("shared", "unclipped"),
}
Tensors = dict[str, torch.Tensor]


def published(model: Any, scheme: str) -> Tensors:
    """Return the tensors of a publish that are quantized: codes and scales by name."""

    def gather(entry: Any) -> torch.Tensor:
        whole: torch.Tensor = entry.full_tensor()
        return whole.bfloat16()

    with torch.no_grad():
        found = sharded_wire_tensors(model, gather, scheme=get_scheme(scheme, GROUP), ignore=IGNORE)
        return {name: tensor.clone() for name, tensor in found if not name.endswith("weight_shape")}


def train(kind: str, scheme: str, run: str) -> dict[str, Any]:
    model, _ = build(kind, scheme, large=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = rows(4, LENGTH)[ORDERS[run]][rank::world]
    found: dict[str, Any] = {"digests": [], "losses": []}
    for step in range(STEPS):
        quantize_shards(model)
        if step == 0:
            found["start"] = published(model, scheme)
        total = torch.zeros(())
        for row in mine:
            loss = loss_of(model, row[None]) / len(mine)
            loss.backward()
            total += loss.detach() / world
        dist.all_reduce(total)
        found["losses"].append(float(total))
        if step == 0:
            found["gradients"] = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        if run in CLIPPED:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found["end"] = published(model, scheme)
        found["digests"].append(digest(list(found["end"].values())))
    return found


def codes_of(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the codes of `tensor` as integers in the order of their values, or None if it has no codes."""
    raw = tensor.contiguous().view(torch.uint8).flatten()
    if name.endswith("weight_packed"):
        return torch.cat((raw & 0xF, raw >> 4)).int()
    if tensor.dtype == torch.int8:
        return tensor.flatten().int()
    if tensor.dtype == torch.float8_e4m3fn:
        size = (raw & 0x7F).int()
        return torch.where(raw >= 0x80, -size, size)
    return None


def apart(first: Tensors, second: Tensors) -> dict[str, float]:
    """Return the shares of codes and scales that differ, and the largest difference of a code."""
    codes = scales = other_codes = other_scales = largest = 0
    for name, tensor in first.items():
        mine, others = codes_of(name, tensor), codes_of(name, second[name])
        if mine is not None and others is not None:
            difference = (mine - others).abs()
            codes, other_codes = codes + len(mine), other_codes + int((difference > 0).sum())
            largest = max(largest, int(difference.max()))
        elif name.endswith("_scale"):
            scales, other_scales = scales + tensor.numel(), other_scales + int((tensor != second[name]).sum())
    return {"codes": other_codes / codes, "scales": other_scales / scales, "largest": largest}


def compare(one: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return how `found` differs from the run on one rank."""
    pairs = zip(one["digests"], found["digests"], strict=True)
    first = next((step for step, (a, b) in enumerate(pairs, 1) if a != b), None)
    gradients = [
        float((found["gradients"][name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in one["gradients"].items()
        if gradient.abs().max()
    ]
    return {
        "first_differing_step": first,
        "gradient_apart": max(gradients),
        "at_the_end": apart(one["end"], found["end"]),
        "moved": apart(found["start"], found["end"])["codes"],
        "losses": [found["losses"][0], found["losses"][-1]],
        "digests": {step: found["digests"][step - 1] for step in (1, STEPS)},
    }


def child(rank: int, world: int, port: int, jobs: list[tuple[str, str, str]], folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    for kind, scheme, run in jobs:
        found = train(kind, scheme, run)
        if rank == 0:
            torch.save(found, Path(folder, f"{kind}_{scheme}_{run}_{world}.pt"))
        dist.barrier()
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    cases = [(kind, scheme) for kind in args.kinds for scheme in args.schemes]
    found: dict[str, Any] = {}
    if args.output and args.output.exists():
        found = json.loads(args.output.read_text())["runs"]
    with tempfile.TemporaryDirectory() as folder:
        versions = json.loads(write_versions(folder).read_text())
        for world, runs in WORLDS.items():
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            jobs = [(*case, run) for case in cases for run in runs]
            torch.multiprocessing.spawn(child, (world, port, jobs, folder), nprocs=world)
            for kind, scheme, run in jobs:
                one = torch.load(Path(folder, f"{kind}_{scheme}_{'shared' if run == 'reordered' else run}_1.pt"))
                row = compare(one, torch.load(Path(folder, f"{kind}_{scheme}_{run}_{world}.pt")))
                found.setdefault(f"{kind} {scheme}", {}).setdefault(run, {})[str(world)] = row
                print(kind, scheme, run, world, json.dumps(row), flush=True)
    if args.output:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        setting = {"steps": STEPS, "lr": LR, "tokens_per_row": LENGTH}
        write_json(args.output, {"date": date, "versions": versions, "setting": setting, "runs": found})


if __name__ == "__main__":
    main()
