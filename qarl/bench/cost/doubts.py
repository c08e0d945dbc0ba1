"""What makes a prediction doubtful: ceilings whose fit came out at nothing, and sizes far beyond the measured ones.

A fit has no negative costs, so noise leaves a cost of 0 where a width or a length must cost something, and another one
carries it: right at the proportions that were measured, wrong at others. Beyond the last point a cost goes on in
proportion, which holds for a while.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from qarl.bench.cost.ceilings import Ceilings
from qarl.bench.cost.workload import Workload

FAR = 4.0
"""Times the largest size that was measured."""
NEEDED = ("step", "layer", "logit", "request", "token_hidden", "token_intermediate", "token_width", "decode_key",
          "prefill_pair")  # fmt: skip
"""Costs of an engine that are something on every machine."""
WIDTHS = ("hidden", "intermediate", "attention_width")


def doubts(ceilings: Ceilings, work: Workload | None = None) -> list[str]:
    """Lines to print; none for assumed ceilings. `work`: what is predicted from them."""
    if ceilings.assumed:
        return []
    found = [f"{what} costs nothing by the ceilings: measure them again" for what in _nothing(ceilings)]
    return found + ([] if work is None else list(_far(ceilings, work)))


def warn(ceilings: Ceilings, work: Workload | None = None) -> None:
    """Print them."""
    for line in doubts(ceilings, work):
        print(f"doubtful: {line}", file=sys.stderr)


def _nothing(ceilings: Ceilings) -> Iterator[str]:
    for name, product in ceilings.products.items():
        if not product.points[-1][3]:
            yield f"a weight of {name} products of {product.points[-1][0]:.0f} rows and more"
    for name in NEEDED:
        if not getattr(ceilings.engine, name):
            yield f"the engine's {name}"
    for level, passes in ceilings.blocks.items():
        for direction, block in passes.items():
            for width in WIDTHS:
                if not getattr(block, width):
                    yield f"{width} of a block's {direction} at level {level}"


def _far(ceilings: Ceilings, work: Workload) -> Iterator[str]:
    rows = work.row_lengths()
    attention = min(block.attention[-1][0] for passes in ceilings.blocks.values() for block in passes.values())
    if max(rows) > FAR * attention:
        yield f"rows of {max(rows)} tokens; attention was measured up to {attention:.0f}, in proportion from there"
    tokens = max(rows) * max(work.micro_batch_size, work.log_prob_micro_batch_size)
    largest = min(product.points[-1][0] for name, product in ceilings.products.items() if name.startswith("trainer"))
    if tokens > FAR * largest:
        yield f"products of {tokens} rows; they were measured up to {largest:.0f}, in proportion from there"
