"""`qarl bench costs`: what one layer of a model and the whole model cost on a GPU, by counting. No GPU is needed.

    qarl bench costs model=Qwen3-30B-A3B scheme=w4a16 tokens=22528 gpus=8

The trainer's own code runs at the model's real sizes on tensors without memory (`qarl.bench.costs.counting` says what
counts as a kernel, a copy, a synchronisation and a byte). `least` is the number of bytes that the phase cannot avoid.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qarl.bench.arguments import read
from qarl.bench.sources import default_group_size, find_model
from qarl.checks.model_size import ModelSize

if TYPE_CHECKING:
    from qarl.bench.costs.phases import Phase

SCHEMES = ("w4a16", "w8a8", "fp8", "bf16")


@dataclass(frozen=True)
class Counted:
    """
    model     a name from qarl/bench/models, or a folder
    scheme    w4a16, w8a8 or fp8; bf16 counts only optimizer and publish
    tokens    tokens of a micro-batch
    gpus      ranks that share the weights
    json      the file to write"""

    model: str = "Qwen3-30B-A3B"
    scheme: str = "w4a16"
    tokens: int = 22528
    gpus: int = 8
    json: Path | None = None


KEYS = Counted


def run_costs(part: str, given: Sequence[str]) -> int:
    """Run `qarl bench costs`, and return the exit code."""
    keys = read(Counted, given, {"scheme": SCHEMES})
    source = find_model(keys.model)
    phases = count(source.size, keys)
    print(f"{source.name}, {keys.scheme}, {keys.tokens} tokens a micro-batch, weights shared by {keys.gpus} ranks\n")
    print(table(phases, source.size))
    if keys.json:
        rows = [asdict(phase) | {"moved": phase.counts.moved} for phase in phases]
        keys.json.write_text(json.dumps({"model": source.name, "phases": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def count(size: ModelSize, keys: Counted) -> list[Phase]:
    """Return the phases of one layer. Forward and backward of its experts and of its dense products are apart."""
    from qarl.bench.costs import phases

    group = default_group_size(size)
    found: list[Phase] = []
    if keys.scheme != "bf16":
        found += phases.dense_phases(size, keys.scheme, group, keys.tokens)
        found += phases.expert_phases(size, keys.scheme, group, keys.tokens) if size.experts else []
        found.append(phases.quantize_phase(size, keys.scheme, group, keys.gpus))
        found.append(phases.gather_phase(size, keys.scheme, group, keys.gpus))
    found.append(phases.optimizer_phase(size, keys.gpus)[0])
    return [*found, phases.publish_phase(size, keys.scheme, group), phases.receive_phase(size, keys.scheme, group)]


def table(phases: Sequence[Phase], size: ModelSize) -> str:
    """Return a Markdown table of one layer, with the kernels and bytes of all layers beside it."""
    heads = ("phase", "kernels", "copies", "syncs", "GB", "least GB", "ratio", "kernels, all layers", "GB, all layers")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for phase in phases:
        counts = phase.counts
        cells = [phase.name, counts.kernels, counts.copies, counts.syncs, f"{counts.moved / 1e9:.2f}"]
        cells += [f"{phase.least / 1e9:.2f}", f"{counts.moved / phase.least:.2f}" if phase.least else ""]
        cells += [counts.kernels * size.layers, f"{counts.moved * size.layers / 1e9:.0f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
