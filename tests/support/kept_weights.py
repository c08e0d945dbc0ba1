"""The last versions of a model's weights under FSDP2: one gloo rank of test_kept_versions.py.

    kept_weights.py OUTPUT_FILE SCHEME

The model is that of sharded_layers.py. Every version is one step of AdamW on from the one before.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from sharded_layers import loss_of, make_input, masters, publish, refusal, sharded

from qarl.quant.fsdp import quantize_shards
from qarl.quant.kept_versions import KeptVersions

VERSIONS = 4
MOST = 3


def output_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(make_input(0)).clone()


def update(model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model(make_input(number)), number).backward()
    optimizer.step()


def main() -> None:
    output, scheme = sys.argv[1:]
    torch.distributed.init_process_group("cpu:gloo")
    rank = torch.distributed.get_rank()
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (torch.distributed.get_world_size(),)
    )
    model, _ = sharded(mesh, scheme)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    kept = KeptVersions(model, most=MOST)
    report: dict[str, Any] = {"outputs": [], "sizes": []}
    for version in range(VERSIONS):
        if version:
            report["stale"] = refusal(partial(kept.keep, version), RuntimeError)
        quantize_shards(model)
        kept.keep(version)
        report["outputs"].append(output_of(model))
        report["sizes"].append(kept.nbytes)
        if version + 1 < VERSIONS:
            update(model, optimizer, version)
    before, wire = masters(model), publish(model, scheme)
    report["contained"] = [version in kept for version in range(VERSIONS)]
    report["missing"] = refusal(lambda: kept.use(0), KeyError)
    report["again"] = {}
    for version in (1, 3, 2):
        kept.use(version)
        quantize_shards(model)  # as the engine does before each forward
        report["again"][version] = output_of(model)
    kept.use(None)
    report["own"] = output_of(model)
    after, wire_after = masters(model), publish(model, scheme)
    report["same_masters"] = all(torch.equal(before[name], after[name]) for name in before)
    report["same_wire"] = all(
        torch.equal(wire[name].view(torch.uint8), wire_after[name].view(torch.uint8))
        for name in wire
    )
    report["masters_bytes"] = sum(p.to_local().nbytes for p in model.parameters())
    torch.save(report, f"{output}.{rank}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
