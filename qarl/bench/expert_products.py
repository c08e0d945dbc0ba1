"""Competing implementations of a layer of experts, as in vLLM's fused kernels: routing, both products, SiLU, the sum.

`m` counts tokens. On GPUs the BF16 baseline is `torch.nn.functional.grouped_mm`. On CPUs it is one product per expert,
and vLLM's operator for BF16 experts is measured too. The first and last tokens of a result are compared with a float64
computation from the same quantized input and weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from qarl.bench.kernels import Arguments
from qarl.bench.products import Competitor, Group, ends, error_of, random_rows
from qarl.kernels.experts import grouped
from qarl.kernels.experts.autograd import BF16_KERNELS, EXPERTS_KERNELS, ReferenceExperts
from qarl.kernels.experts.grouped import ExpertsKernel, ExpertsShape, Routing, Tensors, route, scheme_of
from qarl.kernels.reference import silu_mul
from qarl.quant.quantize import quantize
from qarl.quant.scheme import Scheme, get_scheme

ROUTINGS = ("balanced", "skewed")
LAYER_ERROR = {"bf16": 5e-3, "w4a16": 5e-3, "w8a8": 1e-2, "fp8": 2e-2}
"""Allowed relative error of a whole layer: it has three to five BF16 roundings, and 8-bit codes may differ by one."""
Rounded = Callable[[torch.Tensor], torch.Tensor]
"""A function that converts rows to the float64 values that a product multiplies."""


class ExpertLayer:
    """Random BF16 experts, and their low-bit tensors by scheme. `failures`: tensors that could not be made, and why."""

    def __init__(self, shape: ExpertsShape, arguments: Arguments, device: torch.device) -> None:
        self.shape, self.group_size = shape, arguments.group_size
        self.failures: dict[str, str] = {}
        e, _, hidden, intermediate = shape
        sizes = {"gate_up": (e, 2 * intermediate, hidden), "down": (e, hidden, intermediate)}
        self.weights = {
            name: (torch.randn(size, device=device) / size[2] ** 0.5).bfloat16() for name, size in sizes.items()
        }
        self.quantized: dict[str, dict[str, Tensors]] = {}
        for name in (name for name in arguments.scheme if name in EXPERTS_KERNELS):
            scheme = get_scheme(name, self.group_size)
            problems = [scheme.check_shape("the experts", *size[1:]) for size in sizes.values()]
            if why_not := next(filter(None, problems), None):
                self.failures[name] = why_not
            else:
                self.quantized[name] = {part: self._stacked(weight, scheme) for part, weight in self.weights.items()}

    @staticmethod
    def _stacked(weight: torch.Tensor, scheme: Scheme) -> Tensors:
        """Quantize all experts in one call. This is correct because groups and channels do not span rows."""
        made = quantize(weight.flatten(0, 1), scheme).tensors
        return {name: tensor.view(*weight.shape[:2], -1) for name, tensor in made.items() if name != "weight_shape"}

    def kernels(self, scheme: str, device: torch.device) -> list[type[ExpertsKernel]]:
        """Return the kernels for the whole layer. The PyTorch reference is left out if there is a faster one."""
        group_size = self.group_size if scheme == "w4a16" else None
        kernels = BF16_KERNELS if scheme == "bf16" else EXPERTS_KERNELS[scheme]
        able = [kernel for kernel in kernels if kernel.unavailable(scheme, device, self.shape, group_size) is None]
        fast = [kernel for kernel in able if kernel is not ReferenceExperts]
        return fast if fast or scheme == "bf16" else able

    def topk(self, tokens: int, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (weights, ids) [T, k].

        Balanced routing gives every expert the same number of rows. Skewed routing draws a token's experts without
        replacement, with probabilities proportional to 1, 1/2, 1/3, ..."""
        e, k = self.shape.experts, self.shape.top_k
        device = self.weights["down"].device
        generator = torch.Generator(device).manual_seed(tokens)
        if routing == "balanced":
            ids = (torch.arange(tokens * k, device=device) % e).view(tokens, k)
        else:
            wanted = -torch.arange(1, e + 1, device=device).float().log()
            noise = torch.empty(tokens, e, device=device).exponential_(generator=generator).log()
            ids = (wanted - noise).topk(k).indices
        weights = torch.rand(tokens, k, generator=generator, device=device)
        return weights / weights.sum(1, keepdim=True), ids.to(torch.int32)


def experts(layer: ExpertLayer, tokens: int, routing: str) -> list[Competitor]:
    """Return the competitors for the whole layer."""
    weights, ids = layer.topk(tokens, routing)
    gate_up, down = layer.weights["gate_up"], layer.weights["down"]
    x, way = random_rows(tokens, layer.shape.hidden, down), route(ids, layer.shape.experts)
    flop, rows = 2 * tokens * layer.shape.top_k * (gate_up[0].numel() + down[0].numel()), 2 * x.nbytes
    plain = partial(ReferenceExperts.forward, x, weights, ids, ({"weight": gate_up}, {"weight": down}))
    some = ends(x), ends(weights).double(), ends(ids)
    bf16: dict[str, Tensors] = {name: {"weight": weight} for name, weight in layer.weights.items()}
    exact = _exact_layer(*some, bf16, torch.Tensor.double)
    share = _share(way)
    moved = rows + int(share * (gate_up.nbytes + down.nbytes))
    found = [Competitor("bf16", "bf16", plain, error_of(plain, exact), LAYER_ERROR["bf16"], moved, flop)]
    for scheme, parts in [("bf16", bf16), *layer.quantized.items()]:
        moved = rows + int(share * sum(map(_nbytes, parts.values())))
        for kernel in layer.kernels(scheme, x.device):
            try:
                prepared = kernel.prepare(parts["gate_up"], parts["down"])
            except Exception as raised:  # third-party code may raise anything; the rest must still be measured
                layer.failures[f"{scheme} {kernel.name}"] = f"{type(raised).__name__}: {raised}"
                continue
            call = partial(kernel.forward, x, weights, ids, prepared)
            error = error_of(call, _exact_layer(*some, parts, _as_read(kernel, scheme)))
            found.append(Competitor(scheme, kernel.name, call, error, LAYER_ERROR[scheme], moved, flop))
    return found


def groups(arguments: Arguments, device: torch.device, not_measured: dict[str, str]) -> Iterator[Group]:
    """Yield the groups of expert layers. `n` and `k` are the hidden size."""
    for model, numbers in arguments.expert_layers():
        layer = ExpertLayer(ExpertsShape(*numbers), arguments, device)
        hidden = layer.shape.hidden
        for tokens, routing in itertools.product(arguments.m, ROUTINGS):
            keys = {"operation": "experts", "model": model, "layer": f"experts_layer, {routing}"}
            yield Group(keys | {"n": hidden, "k": hidden, "m": tokens}, experts(layer, tokens, routing))
        not_measured |= {f"{model} experts: {name}": why for name, why in layer.failures.items()}


def _share(way: Routing) -> float:
    """Return the share of experts that have rows."""
    return float((way.ends.diff(prepend=way.ends.new_zeros(1)) > 0).float().mean())


def _as_read(kernel: type[ExpertsKernel], scheme: str) -> Rounded:
    """Return the function that converts rows to the float64 values that a product of `kernel` multiplies."""
    if scheme in ("w4a16", "bf16"):
        return torch.Tensor.double
    return lambda x: _exact(*kernel.quantize(scheme, x.to(torch.bfloat16).contiguous()))


def _exact_weight(tensors: Tensors) -> torch.Tensor:
    """Return the dequantized weights [E, N, K]: rounded to BF16 if the kernel multiplies BF16 weights, else exact."""
    if scheme_of(tensors) in ("w4a16", "bf16"):
        return grouped.dequantized(tensors)
    return _exact(tensors["weight"], tensors["weight_scale"])


def _exact(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values.double() * scale.double()


def _exact_layer(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    parts: Mapping[str, Tensors],
    rounded: Rounded,
) -> torch.Tensor:
    """Compute the layer in float64 for a few tokens, rounding to BF16 between the two products."""
    inputs = rounded(x)
    out = torch.zeros_like(inputs)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        # One expert at a time, because all experts of a large layer would take gigabytes in float64.
        gate_up, down = ({n: t[expert : expert + 1] for n, t in parts[part].items()} for part in ("gate_up", "down"))
        gate, up = (inputs[token] @ _exact_weight(gate_up)[0].double().t()).bfloat16().chunk(2, 1)
        y = rounded(silu_mul(gate, up)) @ _exact_weight(down)[0].double().t()
        out.index_add_(0, token, y * weights[token, place, None])
    return out


def _nbytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
