"""`qarl bench costs`: what one layer of a model and the whole model cost on a GPU, by counting. No GPU is needed.

    qarl bench costs model=Qwen3-30B-A3B scheme=w4a16 tokens=22528 gpus=8

The trainer's own code runs at the model's real sizes on tensors without memory (`qarl.bench.counting` says what
counts as a kernel, a copy, a synchronisation and a byte). `least` is the number of bytes that the phase cannot avoid.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from qarl.bench.arguments import default_group_size, find_model, read
from qarl.bench.report import markdown_table
from qarl.checks.model_size import ModelSize
from qarl.config.quant import ROLLOUT_SCHEMES

if TYPE_CHECKING:
    from qarl.bench.shard_costs import Phase


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
    tokens: PositiveInt = 22528
    gpus: PositiveInt = 8
    json: Path | None = None

    @classmethod
    def parse(cls, part: str, given: Sequence[str]) -> Counted:
        return read(cls, given, {"scheme": ROLLOUT_SCHEMES})


KEYS = Counted


def run(keys: Counted) -> int:
    """Count, print, write, and return the exit code."""
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
    from qarl.bench.layer_costs import passes
    from qarl.bench.shard_costs import gather_phase, optimizer_phase, publish_phase, quantize_phase, receive_phase

    group = default_group_size(size)
    found: list[Phase] = []
    if keys.scheme != "bf16":
        found += passes(size, keys.scheme, group, keys.tokens)
        found += [phase(size, keys.scheme, group, keys.gpus) for phase in (quantize_phase, gather_phase)]
    found.append(optimizer_phase(size, keys.gpus)[0])
    return found + [phase(size, keys.scheme, group) for phase in (publish_phase, receive_phase)]


def table(phases: Sequence[Phase], size: ModelSize) -> str:
    """Return a Markdown table of one layer, with the kernels and bytes of all layers beside it."""
    heads = ("phase", "kernels", "copies", "syncs", "GB", "least GB", "ratio", "kernels, all layers", "GB, all layers")
    rows = []
    for phase in phases:
        counts = phase.counts
        cells = [phase.name, counts.kernels, counts.copies, counts.syncs, f"{counts.moved / 1e9:.2f}"]
        cells += [f"{phase.least / 1e9:.2f}", f"{counts.moved / phase.least:.2f}" if phase.least else ""]
        rows.append([*cells, counts.kernels * size.layers, f"{counts.moved * size.layers / 1e9:.0f}"])
    return markdown_table(heads, rows)
