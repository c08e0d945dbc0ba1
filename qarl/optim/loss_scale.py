"""Dynamic loss scaling for gradients in FP16.

FP16's smallest positive number is 6e-8, and gradients of a mean over many tokens are often smaller. So the loss is
multiplied by a scale before its backward, and the FP32 sums of the gradients are divided by this scale. If a gradient
overflows, the update is skipped and the scale is halved. After `INTERVAL` updates without an overflow the scale is
doubled. Scales are powers of two, so scaling causes no rounding errors unless a number overflows or becomes subnormal.

`torch.amp.GradScaler` has the same rule. QaRL does not use it, because it divides each parameter's `.grad` in FP16,
while QaRL sums the gradients of micro-batches in FP32 (`qarl.trainer.optim`).
"""

from __future__ import annotations

FIRST = 2.0**16
"""The first scale, as in torch.amp.GradScaler."""
INTERVAL = 100
"""Number of updates without an overflow after which the scale is doubled. torch uses 2000, more than most runs have."""
LARGEST, SMALLEST = 2.0**24, 1.0


class LossScale:
    """`scale`: the factor of the loss. `good`: number of updates without an overflow since the scale last changed.
    `overflows`: number of all skipped updates. If `active` is false, the scale stays 1."""

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self.scale = FIRST if active else 1.0
        self.good = self.overflows = 0

    def updated(self, *, overflow: bool) -> None:
        """Adapt the scale. `overflow`: true if the update was skipped because of an overflow, false after an update."""
        if not self.active:
            return
        if overflow:
            self.overflows, self.good = self.overflows + 1, 0
            self.scale = max(self.scale / 2, SMALLEST)
            return
        self.good += 1
        if self.good == INTERVAL:
            self.scale, self.good = min(self.scale * 2, LARGEST), 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good": self.good, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale, self.good, self.overflows = state["scale"], int(state["good"]), int(state["overflows"])
