"""Compare every linear of the decoder layers, in trainer and engine, with a reference before anything is timed.

The reference quantizes the trainer's BF16 weight and multiplies in exact PyTorch (`qarl.kernels.reference`). So the
check finds an unpublished weight and a wrong kernel, even one that multiplies in BF16 instead of int8 (int8 changes
results by 0.6%). If the mismatch (mean |δ|) is over its limit, the trainer ends the launch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qarl.checks.layers import FUSED_LAYERS
from qarl.kernels.registry import LINEAR_KERNELS
from qarl.quant.linear import QuantLinear
from qarl.quant.quantize import quantize
from qarl.quant.scheme import Scheme
from qarl.rollout.engine import RolloutEngine
from qarl.trainer.policy import Policy

ROWS = 16
ALLOWED, ALLOWED_FP8 = 5e-3, 1e-2
"""Allowed relative error (root mean square) of two BF16 results. Each is rounded, and a few 8-bit codes may differ by
one; FP8 tensor cores sum in fewer bits."""
PARTS = {**FUSED_LAYERS, "o_proj": ("o_proj",), "down_proj": ("down_proj",)}
"""vLLM's linears of a decoder layer -> the trainer's linears that each one fuses."""
LEAVES = {part for parts in PARTS.values() for part in parts}


class WrongNumbers(Exception):
    """A linear differs from the reference, so the case (scheme and level) gets no figures."""


@torch.no_grad()
def check_linears(policy: Policy, engine: RolloutEngine | None) -> None:
    """Raise WrongNumbers for the first linear whose error is too large."""
    kernels = {layer.kernel.name for layer in policy.quantized_layers().values()}
    if "reference" in kernels:
        raise WrongNumbers("the trainer's linears run the reference kernel, because no fast kernel can serve here")
    theirs = {} if engine is None else dict(engine.model().named_modules())
    modules: dict[str, Any] = dict(policy.model.named_modules())
    ours = {name: module for name, module in modules.items() if name.rpartition(".")[2] in LEAVES}
    for block in dict.fromkeys(name.rpartition(".")[0] for name in ours):
        for fused, parts in PARTS.items():
            names = [f"{block}.{part}" for part in parts]
            linears: list[nn.Linear] = [ours[name] for name in names if name in ours]
            if not linears:  # `block` is an attention or an MLP, and `fused` belongs to the other
                continue
            module = theirs.get(f"{block}.{fused}")
            if engine is not None and module is None:
                raise WrongNumbers(f"the engine has no {block}.{fused} to compare with")
            _compare(names, linears, policy.scheme, module)


def _compare(names: list[str], linears: list[nn.Linear], scheme: Scheme, engines: nn.Module | None) -> None:
    generator = torch.Generator(linears[0].weight.device).manual_seed(0)
    shape = (ROWS, linears[0].in_features)
    x = torch.randn(shape, generator=generator, device=linears[0].weight.device).bfloat16()
    expected = [reference(linear, scheme, x) for linear in linears]
    allowed = ALLOWED_FP8 if scheme.name == "fp8" else ALLOWED
    found = [("the trainer", linear(x)) if isinstance(linear, QuantLinear) else None for linear in linears]
    pairs = [(name, *one, true) for name, one, true in zip(names, found, expected, strict=True) if one]
    if engines is not None:
        outputs = engines(x)[0].split([true.shape[1] for true in expected], -1)
        pairs += [(name, "the engine", y, true) for name, y, true in zip(names, outputs, expected, strict=True)]
    for name, who, y, true in pairs:
        error = float((y.float() - true.float()).norm() / true.float().norm())
        if not error <= allowed:  # true for NaN, too
            raise WrongNumbers(f"{name}: {who} differs from the reference by {error:.1e}; {allowed:.1e} is allowed")


def reference(linear: nn.Linear, scheme: Scheme, x: torch.Tensor) -> torch.Tensor:
    """Return the output [ROWS, N] that `linear` must give for x [ROWS, K] under `scheme`."""
    if not scheme.quantized:
        bias = None if linear.bias is None else linear.bias.float()
        return F.linear(x.float(), linear.weight.float(), bias)
    kernel = LINEAR_KERNELS[scheme.name][-1]
    return kernel.linear(x, kernel.prepare(quantize(linear.weight, scheme).tensors), linear.bias)
