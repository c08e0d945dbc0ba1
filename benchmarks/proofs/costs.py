"""What one layer of a model and the whole model cost on a GPU, by counting. No GPU is needed.

    python -m benchmarks.proofs costs model=Qwen3-30B-A3B scheme=w4a16 tokens=22528 gpus=8 --output FILE

The trainer's own code runs at the model's real sizes on tensors without memory (`benchmarks.proofs.counting` says what
counts as a kernel, a copy, a synchronisation and a byte). `least` is the number of bytes that the phase cannot avoid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.proofs.harness import Record
from benchmarks.proofs.layer_costs import own_forward_phase, passes
from benchmarks.proofs.shard_costs import (
    Phase,
    gather_phase,
    optimizer_phase,
    publish_phase,
    quantize_phase,
    receive_phase,
)
from qarl.bench.model import default_group_size, find_model
from qarl.bench.report import markdown_table
from qarl.checks.model_size import ModelSize


def costs(
    record: Record,
    *,
    model: str = "Qwen3-30B-A3B",
    scheme: str = "w4a16",
    tokens: int = 22528,
    gpus: int = 8,
) -> None:
    """Count the phases of a layer for micro-batches of `tokens`, weights shared by `gpus`. bf16 has two phases."""
    size = find_model(model).size
    phases = [phase for phase in count(size, scheme, tokens, gpus) if record.wants(phase.name)]
    for phase in phases:
        record.add(phase.name, asdict(phase), ok=phase.counts.syncs <= 1)
    print(f"\n{model}, {scheme}, {tokens} tokens a micro-batch, weights shared by {gpus} ranks\n")
    print(table(phases, size))


def count(size: ModelSize, scheme: str, tokens: int, gpus: int) -> list[Phase]:
    """Return the phases of one layer. Forward and backward of its experts and of its dense products are apart."""
    group = default_group_size(size)
    phases: list[Phase] = []
    if scheme != "bf16":
        phases += passes(size, scheme, group, tokens)
        if size.experts:
            phases.append(own_forward_phase(size, scheme, group, tokens))
        phases += [phase(size, scheme, group, gpus) for phase in (quantize_phase, gather_phase)]
    phases.append(optimizer_phase(size, gpus)[0])
    return phases + [phase(size, scheme, group) for phase in (publish_phase, receive_phase)]


def table(phases: Sequence[Phase], size: ModelSize) -> str:
    """Return a Markdown table of one layer, with the kernels and bytes of all layers beside it."""
    heads = (
        "phase",
        "kernels",
        "copies",
        "syncs",
        "GB",
        "least GB",
        "ratio",
        "kernels, all layers",
        "GB, all layers",
    )
    rows = []
    for phase in phases:
        counts = phase.counts
        cells = [
            phase.name,
            counts.kernels,
            counts.copies,
            counts.syncs,
            f"{counts.moved / 1e9:.2f}",
        ]
        cells += [
            f"{phase.least / 1e9:.2f}",
            f"{counts.moved / phase.least:.2f}" if phase.least else "",
        ]
        rows.append(
            [*cells, counts.kernels * size.layers, f"{counts.moved * size.layers / 1e9:.0f}"]
        )
    return markdown_table(heads, rows)
