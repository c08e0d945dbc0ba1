"""The section `quant` of the config. Its schemes are those of `qarl.schemes`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from qarl.config.level import Level
from qarl.config.types import ByName, OneOf, Patterns, Sane, Section, Unit
from qarl.schemes import DEFAULT_SCHEME, scheme_help, scheme_names
from qarl.schemes.kernel_choice import KernelChoice

SchemeName = Annotated[str, OneOf(scheme_names)]


class QuantConfig(Section):
    """Quantization, the same in the rollouts and in the trainer's forward."""

    scheme: SchemeName = Field(default=DEFAULT_SCHEME, description=scheme_help())

    group_size: Annotated[int, Unit("weights"), Sane(8, 4096)] = Field(
        default=128, ge=1, multiple_of=8
    )
    """Number of weights along the input dimension that share one scale; a multiple of 8. Used by w4a16 and w4a8."""

    ignore: Patterns = ["lm_head"]
    """Modules that stay BF16: exact names, or `re:` and a regular expression matched from the start of the name."""

    align: Annotated[Level, ByName()] = Level.MODEL
    """How far the trainer's forward follows the engine. `off`: plain BF16, to show the mismatch. `linears`: linear
    layers multiply by the published low-bit tensors (no effect with scheme bf16). `model`: also round like the engine
    in residual additions, norms, rotary embedding and attention; on a CPU, attention is the engine's own operator.
    `exact`: the same, with a limit on the mismatch of nearly 0. On a GPU it falls back to `model`, and only lets cuBLAS
    split no sums of BF16 products, which no GPU has confirmed (docs/understand/cuda.md)."""

    kernels: Annotated[KernelChoice, ByName()] = KernelChoice.ENGINE
    """Which kernels of linears and experts the rollouts and the trainer run. `engine`: vLLM's own. `qarl`: QaRL's
    batch-invariant kernels on both sides. On a GPU these are for w4a16, w8a8 and fp8, and on a CPU for w4a8 without
    experts, which vLLM cannot compute. `machete`: for w4a16 in groups of 64 or 128 without experts on an H100 or H200,
    vLLM's Machete without split sums on both sides; no GPU has run it yet. `dequantized`: for w4a16 without experts on
    a CPU, dequantize the weights after each publish and multiply in BF16 on both sides. This is for debugging and for
    small machines, and is no low-bit rollout (docs/understand/alignment.md)."""

    mismatch_limit: Annotated[float | None, Unit("nats per token"), Sane(0.0, 5.0)] = Field(
        default=None, ge=0
    )
    """Largest allowed mean |δ| between trainer and engine (mismatch/abs_mean; with trainer.staleness
    mismatch/of_version_abs_mean). If it is exceeded before the first update, the run stops. Later, the run only warns.
    null means the default for quant.align (qarl/metrics/mismatch_limit.py)."""
