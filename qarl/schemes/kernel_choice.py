"""`KernelChoice`: the values of `quant.kernels`, with everything that is asked about them.

    engine       trainer and engine run vLLM's own kernels
    qarl         both run QaRL's kernels, whose rows do not depend on each other
    machete      both run vLLM's Machete for int4 weights, with schedules and rows that never split a sum
    dequantized  both dequantize the weights after each publish, and multiply in BF16

A choice is a text, so configs, metrics and messages show its name. Code asks a choice for its properties, never which
one it is. A kernel names the choices that it is for (`options` of `qarl.kernels.base.LinearKernel`).
"""

from __future__ import annotations

from enum import StrEnum


class KernelChoice(StrEnum):
    """Which linear kernels the rollouts and the trainer run."""

    ENGINE = "engine"
    QARL = "qarl"
    MACHETE = "machete"
    DEQUANTIZED = "dequantized"

    @property
    def by_engine(self) -> bool:
        """Whether trainer and engine run vLLM's own kernels. Otherwise QaRL's plugin gives the trainer's to vLLM."""
        return self is KernelChoice.ENGINE

    @property
    def dequantizes(self) -> bool:
        """Whether both sides multiply in BF16 by weights that were dequantized after the publish."""
        return self is KernelChoice.DEQUANTIZED

    @property
    def own_low_bit(self) -> bool:
        """Whether QaRL gives both sides a low-bit kernel, so that the engine needs none for the scheme."""
        return not self.by_engine and not self.dequantizes
