"""What `qarl bench kernels` times of a layer of experts, as in vLLM's fused kernels, beside float64.

The baseline is `torch.nn.functional.grouped_mm` in BF16 on GPUs, and on CPUs one BF16 product per expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch

from qarl.bench.competitors import Competitor, ends, error_of, exact, random_rows
from qarl.bench.kernel_arguments import Arguments
from qarl.kernels.base import ExpertsKernel, ExpertsShape, Tensors
from qarl.kernels.experts import ReferenceExperts
from qarl.kernels.grouped import dequantized, route
from qarl.kernels.reference import silu_mul
from qarl.kernels.registry import experts_kernels_of
from qarl.quant.experts import quantize_stack
from qarl.schemes import UNQUANTIZED, Scheme, get_scheme
from qarl.schemes.base import Operands

ROUTINGS = ("balanced", "skewed")
LAYER_ERROR = {"bf16": 5e-3, "int8": 1e-2, "float8": 3e-2}
"""Allowed relative error of a layer, by the number format of the activations: it has three to five BF16 roundings,
and 8-bit codes may differ by one. In FP8 that is up to an eighth of a value. On an H200, vLLM's CUTLASS kernel and ours
both have up to 2.3e-2 for one to four tokens, and 1.4e-2 for 200."""
OTHER_LAYER_ERROR = 3e-2
"""The same for other number formats."""
Rounded = Callable[[torch.Tensor], torch.Tensor]
"""A function that converts rows to the float64 values that a product multiplies."""


class ExpertLayer:
    """Random BF16 experts, and their low-bit tensors by scheme."""

    def __init__(self, shape: ExpertsShape, arguments: Arguments, device: torch.device) -> None:
        self.shape = shape
        self.group_size = arguments.group_size
        e, _, hidden, intermediate = shape
        sizes = {"gate_up": (e, 2 * intermediate, hidden), "down": (e, hidden, intermediate)}
        self.weights = {
            name: (torch.randn(size, device=device) / size[2] ** 0.5).bfloat16()
            for name, size in sizes.items()
        }
        self.stacks: dict[str, dict[str, Tensors]] = {}
        """By name of the scheme, and of the stack, its tensors. The unquantized ones come first."""
        self.stacks[UNQUANTIZED.name] = {
            name: {"weight": weight} for name, weight in self.weights.items()
        }
        for name in arguments.scheme:
            scheme = self.scheme(name)
            if experts_kernels_of(scheme.operands):
                self.stacks[name] = self._quantized(scheme)

    def scheme(self, name: str) -> Scheme:
        return get_scheme(name, self.group_size)

    def _quantized(self, scheme: Scheme) -> dict[str, Tensors]:
        return {
            part: quantize_stack(weight, scheme, name=part).tensors
            for part, weight in self.weights.items()
        }

    def kernels(self, scheme: Scheme, device: torch.device) -> list[type[ExpertsKernel]]:
        """Return the kernels for the whole layer. The PyTorch reference is left out if there is a faster one."""
        able = [
            kernel
            for kernel in experts_kernels_of(scheme.operands)
            if kernel.unavailable(scheme, device, self.shape) is None
        ]
        fast = [kernel for kernel in able if not kernel.reference]
        return fast if fast or not scheme.quantized else able

    def topk(self, tokens: int, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (weights, ids) [T, k].

        Balanced routing gives every expert the same number of rows. Skewed routing draws a token's experts without
        replacement, with probabilities proportional to 1, 1/2, 1/3, ..."""
        e = self.shape.experts
        k = self.shape.top_k
        device = self.weights["down"].device
        generator = torch.Generator(device).manual_seed(tokens)
        if routing == "balanced":
            ids = (torch.arange(tokens * k, device=device) % e).view(tokens, k)
        else:
            log_shares = -torch.arange(1, e + 1, device=device).float().log()
            noise = torch.empty(tokens, e, device=device).exponential_(generator=generator).log()
            ids = (log_shares - noise).topk(k).indices
        weights = torch.rand(tokens, k, generator=generator, device=device)
        return weights / weights.sum(1, keepdim=True), ids.to(torch.int32)


def experts(layer: ExpertLayer, tokens: int, routing: str) -> list[Competitor]:
    """Return the competitors for the whole layer."""
    weights, ids = layer.topk(tokens, routing)
    per_expert = sum(stack[0].numel() for stack in layer.weights.values())
    x = random_rows(tokens, layer.shape.hidden, layer.weights["down"])
    flop = 2 * tokens * layer.shape.top_k * per_expert
    busy = _share_of_experts_with_rows(ids, layer.shape.experts)
    some = ends(x), ends(weights).double(), ends(ids)
    competitors = []
    for name, stacks in layer.stacks.items():
        scheme = layer.scheme(name)
        allowed = LAYER_ERROR.get(scheme.operands.activations, OTHER_LAYER_ERROR)
        size = sum(tensor.nbytes for tensors in stacks.values() for tensor in tensors.values())
        moved = 2 * x.nbytes + int(busy * size)
        kernels = {kernel.name: kernel for kernel in layer.kernels(scheme, x.device)}
        if not scheme.quantized:
            kernels = {"bf16": ReferenceExperts} | kernels  # the baseline
        for label, kernel in kernels.items():
            wire = stacks["gate_up"], stacks["down"]
            prepare = cache(partial(kernel.prepare, *wire, scheme.operands))

            def call(kernel: Any = kernel, prepare: Any = prepare) -> Any:
                # Prepared in the first call, so that a kernel that cannot is only this competitor's failure.
                return kernel.forward(x, weights, ids, prepare())

            exactly = _exact_layer(*some, stacks, scheme.operands, _as_read(kernel, scheme))
            error = error_of(call, exactly)
            competitors.append(Competitor(name, label, call, error, allowed, moved, flop))
    return competitors


def _share_of_experts_with_rows(ids: torch.Tensor, experts: int) -> float:
    ends_of_rows = route(ids, experts).ends
    rows = ends_of_rows.diff(prepend=ends_of_rows.new_zeros(1))
    return float((rows > 0).float().mean())


def _as_read(kernel: type[ExpertsKernel], scheme: Scheme) -> Rounded:
    """Return the function that converts rows to the float64 values that a product of `kernel` multiplies."""
    if not scheme.rounds_activations:
        return torch.Tensor.double
    operands = scheme.operands
    return lambda x: exact(*kernel.quantize(operands, x.to(torch.bfloat16).contiguous()))


def _exact_stack(tensors: Tensors, operands: Operands) -> torch.Tensor:
    """Return the dequantized weights [E, N, K]: rounded to BF16 if the kernel multiplies BF16 weights, else exact."""
    if not operands.rounds_activations:
        return dequantized(tensors)
    return exact(tensors["weight"], tensors["weight_scale"])


def _exact_layer(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    parts: Mapping[str, Tensors],
    operands: Operands,
    rounded: Rounded,
) -> torch.Tensor:
    """Compute the layer in float64 for a few tokens, rounding to BF16 between the two products."""
    inputs = rounded(x)
    out = torch.zeros_like(inputs)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        # One expert at a time, because all experts of a large layer would take gigabytes in float64.
        gate_up, down = (
            {n: t[expert : expert + 1] for n, t in parts[part].items()}
            for part in ("gate_up", "down")
        )
        exact_gate_up, exact_down = (
            _exact_stack(stack, operands)[0].double() for stack in (gate_up, down)
        )
        gate, up = (inputs[token] @ exact_gate_up.t()).bfloat16().chunk(2, 1)
        y = rounded(silu_mul(gate, up)) @ exact_down.t()
        out.index_add_(0, token, y * weights[token, choice, None])
    return out
