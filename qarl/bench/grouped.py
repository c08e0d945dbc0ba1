"""Mixture-of-experts products that compete: on sorted rows, forward and input gradient, and the whole expert layer.

    grouped_linear           y = x W_e^T of every row's expert, from BF16 rows sorted by expert, gate with up and down;
                             8-bit schemes quantize the rows in the same call
    grouped_input_gradient   dX = dY W_e
    experts                  the whole layer, which vLLM's fused kernels compute: routing, both products, SiLU, the sum

`m` counts tokens; each has `top_k` rows. BF16 is `torch.nn.functional.grouped_mm` where it runs, else one product an
expert, whose sizes the loop is told: a real one would wait for the device to learn them. Results are compared with
float64 at the first and last rows, or tokens; quantized rows are those that the kernel's own quantizer makes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from qarl.bench.arguments import Arguments
from qarl.bench.competitors import FP8_ERROR, PRODUCT_ERROR, Competitor
from qarl.bench.shapes import Experts
from qarl.kernels.activations import silu_mul
from qarl.kernels.experts import grouped
from qarl.kernels.experts.fused import EXPERTS_KERNELS, ReferenceExperts, TritonExperts
from qarl.kernels.experts.grouped import ExpertsShape, Routing, Tensors, combine, route
from qarl.kernels.reference import grouped_linear as loop
from qarl.kernels.triton.linears import unavailable as triton_unavailable
from qarl.quant.quantize import quantize
from qarl.quant.scheme import get_scheme

ROUTINGS = ("balanced", "skewed")
CHECKED = 64
"""Rows, or tokens, at each end of a result that are compared with float64."""
LAYER_ERROR = {"bf16": 5e-3, "w4a16": 5e-3, "w8a8": 1e-2, "fp8": 2e-2}
"""Relative RMS error allowed to a whole layer: three to five BF16 roundings, and 8-bit codes that fall one apart."""


class ExpertLayer:
    """Random BF16 experts, and what every scheme made of them; `failures` collects what could not be built."""

    def __init__(self, shape: Experts, arguments: Arguments, device: torch.device) -> None:
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
    def _stacked(weight: torch.Tensor, scheme: Any) -> Tensors:
        """The wire tensors of all experts: groups and channels do not reach across rows."""
        made = quantize(weight.flatten(0, 1), scheme).tensors
        return {
            name: tensor.view(*weight.shape[:2], -1) for name, tensor in made.items() if name != "weight_shape"
        }

    def topk(self, tokens: int, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, ids) [T, k]. Balanced: every expert gets as many rows as the next. Skewed: the e-th most wanted is
        chosen as if wanted 1/e as much as the first."""
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


def grouped_linear(layer: ExpertLayer, part: str, tokens: int, routing: str) -> list[Competitor]:
    """y = x W_e^T."""
    way, weight = route(layer.topk(tokens, routing)[1], layer.shape.experts), layer.weights[part]
    x = _random(len(way.order), weight.shape[2], weight)
    flop, moved = _cost(way, weight)
    found = _bf16(x, weight, way, flop, moved(weight.nbytes))
    for scheme, parts in layer.quantized.items():
        tensors = parts[part]
        kernel = _ours(scheme, x.device)
        seen = partial(kernel.quantize, scheme) if scheme != "w4a16" else None
        call = partial(_product, seen, x, tensors, way.ends)
        error = partial(_off, call, _exact(_double(seen, _ends(x)), tensors, way))
        allowed = FP8_ERROR if scheme == "fp8" else PRODUCT_ERROR
        found.append(Competitor(scheme, kernel.name, call, error, allowed, moved(_nbytes(tensors)), flop))
    return found


def grouped_input_gradient(layer: ExpertLayer, part: str, tokens: int, routing: str) -> list[Competitor]:
    """dX = dY W_e."""
    way, weight = route(layer.topk(tokens, routing)[1], layer.shape.experts), layer.weights[part]
    grad = _random(len(way.order), weight.shape[1], weight)
    flop, moved = _cost(way, weight)
    found = _bf16(grad, weight.mT, way, flop, moved(weight.nbytes))
    for scheme, parts in layer.quantized.items():
        tensors, kernel = parts[part], _ours(scheme, grad.device)
        call = partial(grouped.input_gradient, grad, tensors, way.ends)
        exact = _by_expert(_ends(grad).double(), partial(_dequantized, tensors), way)
        error = partial(_off, call, exact)
        found.append(Competitor(scheme, kernel.name, call, error, PRODUCT_ERROR, moved(_nbytes(tensors)), flop))
    return found


def experts(layer: ExpertLayer, part: str, tokens: int, routing: str) -> list[Competitor]:
    """The whole layer; `part` is not used."""
    weights, ids = layer.topk(tokens, routing)
    e, k, hidden, intermediate = layer.shape
    gate_up, down = layer.weights["gate_up"], layer.weights["down"]
    x = _random(tokens, hidden, down)
    way = route(ids, e)
    share = float((way.ends.diff(prepend=way.ends.new_zeros(1)) > 0).float().mean())
    flop, rows = 2 * tokens * k * (gate_up[0].numel() + down[0].numel()), 2 * x.nbytes
    plain = partial(_plain_layer, x, weights, ids, gate_up, down)
    exact = _exact_layer(x, weights, ids, lambda e: (gate_up[e].double(), down[e].double()), None)
    moved = rows + int(share * (gate_up.nbytes + down.nbytes))
    found = [Competitor("bf16", "bf16", plain, partial(_off, plain, exact), LAYER_ERROR["bf16"], moved, flop)]
    shape = ExpertsShape(e, k, hidden, intermediate)
    for scheme, parts in layer.quantized.items():
        moved = rows + int(share * sum(map(_nbytes, parts.values())))
        for kernel in EXPERTS_KERNELS[scheme]:
            group_size = layer.group_size if scheme == "w4a16" else None
            behind = kernel is ReferenceExperts and x.is_cuda  # asks the device for every expert's rows, in float64
            if behind or kernel.unavailable(scheme, x.device, shape, group_size) is not None:
                continue
            try:
                prepared = kernel.prepare(parts["gate_up"], parts["down"])
            except Exception as raised:  # another project's: whatever it raises, the rest is measured
                layer.failures[f"{scheme} {kernel.name}"] = f"{type(raised).__name__}: {raised}"
                continue
            call = partial(kernel.forward, x, weights, ids, prepared)
            seen = partial(kernel.quantize, scheme) if scheme != "w4a16" else None
            both = partial(_both_exact, parts)
            error = partial(_late_off, call, partial(_exact_layer, x, weights, ids, both, seen))
            found.append(Competitor(scheme, kernel.name, call, error, LAYER_ERROR[scheme], moved, flop))
    return found


BUILDERS: dict[str, Callable[[ExpertLayer, str, int, str], list[Competitor]]] = {
    "grouped_linear": grouped_linear,
    "grouped_input_gradient": grouped_input_gradient,
    "experts": experts,
}
Quantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _ours(scheme: str, device: torch.device) -> type[TritonExperts] | type[ReferenceExperts]:
    """Whose products `grouped.product` runs on `device`."""
    return TritonExperts if triton_unavailable(scheme, device) is None else ReferenceExperts


def _product(seen: Quantizer | None, x: torch.Tensor, tensors: Tensors, ends: torch.Tensor) -> torch.Tensor:
    values, scale = seen(x) if seen else (x, None)
    return grouped.product(values, scale, tensors, ends)


def _cost(way: Routing, weight: torch.Tensor) -> tuple[int, Callable[[int], int]]:
    """(FLOP, bytes of the weights -> bytes that must move): experts without rows are not read."""
    rows = len(way.order)
    share = float((way.ends.diff(prepend=way.ends.new_zeros(1)) > 0).float().mean())
    activations = 2 * rows * (weight.shape[1] + weight.shape[2])
    return 2 * rows * weight[0].numel(), lambda nbytes: activations + int(share * nbytes)


def _bf16(x: torch.Tensor, weight: torch.Tensor, way: Routing, flop: int, moved: int) -> list[Competitor]:
    """x [M, K] and weight [E, N, K]."""
    starts = [0, *way.ends.tolist()]
    calls: dict[str, Callable[[], torch.Tensor]] = {"one by one": partial(_one_by_one, x, weight, starts)}
    try:
        F.grouped_mm(x, weight.mT, offs=way.ends)
    except (RuntimeError, ValueError):
        calls = {"bf16": calls["one by one"]}
    else:
        calls["bf16"] = partial(F.grouped_mm, x, weight.mT, offs=way.ends)
    exact = _by_expert(_ends(x).double(), lambda e: weight[e].double().t(), way)
    return [
        Competitor("bf16", name, call, partial(_off, call, exact), PRODUCT_ERROR, moved, flop)
        for name, call in calls.items()
    ]


def _one_by_one(x: torch.Tensor, weight: torch.Tensor, starts: list[int]) -> torch.Tensor:
    return torch.cat([F.linear(x[a:b], weight[e]) for e, (a, b) in enumerate(pairwise(starts)) if a < b])


def _plain_layer(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    way = route(ids, len(down))
    gate, up = _plain(x[way.token], gate_up, way.ends).chunk(2, 1)
    y = _plain(silu_mul(gate, up), down, way.ends).float() * weights.flatten()[way.order, None]
    return combine(y.to(x.dtype), way, ids.shape[1])


def _plain(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(x, weight.mT, offs=ends) if x.is_cuda else loop(x, weight, ends)


def _random(rows: int, cols: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(rows * 31 + cols)
    return torch.randn(rows, cols, generator=generator, device=like.device).bfloat16()


def _ends(rows: torch.Tensor) -> torch.Tensor:
    return rows if len(rows) <= 2 * CHECKED else torch.cat([rows[:CHECKED], rows[-CHECKED:]])


def _double(seen: Quantizer | None, x: torch.Tensor) -> torch.Tensor:
    if seen is None:
        return x.double()
    values, scale = seen(x.to(torch.bfloat16).contiguous())
    return values.double() * scale.double()


def _one(tensors: Tensors, expert: int) -> Tensors:
    return {name: tensor[expert : expert + 1] for name, tensor in tensors.items()}


def _dequantized(tensors: Tensors, expert: int) -> torch.Tensor:
    """float64 [N, K], rounded to BF16 before: what the backward multiplies by."""
    return grouped.dequantized(_one(tensors, expert))[0].double()


def _exact_weight(tensors: Tensors, expert: int) -> torch.Tensor:
    """float64 [N, K]; W4A16 multiplies by the BF16 rounding of code times scale, the others scale the sum."""
    if "weight_packed" in tensors:
        return _dequantized(tensors, expert)
    return tensors["weight"][expert].double() * tensors["weight_scale"][expert].double()


def _both_exact(parts: dict[str, Tensors], expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _exact_weight(parts["gate_up"], expert), _exact_weight(parts["down"], expert)


def _exact(x: torch.Tensor, tensors: Tensors, way: Routing) -> torch.Tensor:
    return _by_expert(x, lambda expert: _exact_weight(tensors, expert).t(), way)


def _by_expert(x: torch.Tensor, weight: Callable[[int], torch.Tensor], way: Routing) -> torch.Tensor:
    """float64 x @ weight(expert) of the first and last rows, each by its expert's."""
    places = _ends(torch.arange(len(way.order), device=x.device)).to(torch.int32)
    owners = torch.searchsorted(way.ends, places, right=True).tolist()
    parts = []
    for expert in dict.fromkeys(owners):  # rows are sorted by expert, and so are those that are checked
        mine = [i for i, owner in enumerate(owners) if owner == expert]
        parts.append(x[mine] @ weight(expert))
    return torch.cat(parts)


def _exact_layer(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    both: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    seen: Quantizer | None,
) -> torch.Tensor:
    """float64, with BF16 roundings of what lies between the products, at the first and last tokens."""
    x, weights, ids = _ends(x), _ends(weights).double(), _ends(ids)
    inputs = _double(seen, x)
    out = torch.zeros_like(inputs)
    for expert in ids.unique().tolist():
        gate_up, down = both(expert)
        token, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = (inputs[token] @ gate_up.t()).bfloat16().chunk(2, 1)
        y = _double(seen, silu_mul(gate, up)) @ down.t()
        out.index_add_(0, token, y * weights[token, place, None])
    return out


def _off(call: Callable[[], torch.Tensor], expected: torch.Tensor) -> float:
    y = call()
    difference = (_ends(y).double() - expected).norm() / expected.norm()
    return float(difference) if bool(y.isfinite().all()) else float("nan")


def _late_off(call: Callable[[], torch.Tensor], expected: Callable[[], torch.Tensor]) -> float:
    return _off(call, expected())


def _nbytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
