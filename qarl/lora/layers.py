"""Adapters on linears: the engine's arithmetic in the forward, and gradients for A, B and x only.

    forward   y = base(x) + (x Aᵀ) Bsᵀ     Bs = B alpha / r; the base by its own kernel, on frozen low-bit tensors
    backward  dX = dY Ŵ + (dY Bs) A        dW of the base is never computed
              dA = (dY Bs)ᵀ x,  dB = dYᵀ (x Aᵀ) alpha / r

vLLM serves adapters on a CPU with PyTorch (`vllm/lora/ops/torch_ops/lora_ops.py` and `PunicaWrapperCPU`). x and
A are cast to FP32 and multiplied token by token, so this product sums in the order of a matrix-vector product. It is
rounded to BF16 and multiplied by Bs in BF16, and the result is added to the base's output in BF16. q, k, v, gate and up
have their own A and B, although their base weights are fused. vLLM gathers A and B for each token. Here all tokens read
the same A, which gives the same bits and needs no memory.

The engine's product with Bs is a batch of matrix-vector products, 10 to 100 times slower than one matrix product. The
trainer computes one product if that has the engine's bits, which `one_product` tries out for each shape. PyTorch sums
in another order if tokens x N x r is at most 4096. So if N x r is less, as in tiny models, the last few responses of a
batch may have other bits than in the trainer.

On a GPU vLLM multiplies with Triton kernels (`vllm/lora/ops/triton_ops`), which round in the same places. But
they sum x Aᵀ in FP32 with atomics, in an order that changes from call to call. So no δ is promised there, and equal
seeds need not give equal responses.

vLLM has some ranks only (`qarl.config.lora.RANKS`), and computes any other with A and B that have zeros up to the next
one. The forward multiplies by the same padded A and B, so that both sums have the same length and order.

To give a linear an adapter, its class is replaced by a subclass with the same name, as in `qarl.align.cpu`. So names of
modules, hooks and checkpoints of the base do not change, and `lora_A` and `lora_B` are not in its state dict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import repeat
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qarl.config.lora import ALL_LINEAR, LoraConfig, engine_rank, is_pattern, is_target
from qarl.errors import UserError
from qarl.kernels.base import is_gpu
from qarl.lora.adapter import PREFIX, A, Adapter, B, adapted_leaves, peft_targets, with_rank
from qarl.lora.start import start_tensors
from qarl.quant.convert import ROUTERS, linear_shapes
from qarl.quant.linear import QuantLayer, shared

ROWS = 256
"""Number of tokens whose products with B are computed at once where `one_product` is false. oneDNN copies B for each of
them."""


def _row_by_row(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ [M, N] as vLLM computes it for x [M, K] and W [N, K]: one matrix-vector product for each row of x."""
    return torch.einsum("bi,boi->bo", x, weight.expand(len(x), *weight.shape))


@cache
def one_product(rows: int, columns: int, threads: int) -> bool:
    """Return whether one BF16 matrix product with a weight [rows, columns] gives the bits of `_row_by_row` here.

    With AMX it does not. The operands have sizes from 2^-8 to 2^8, because another order of sums seldom changes the
    BF16 result of operands of similar size. `threads`: `torch.get_num_threads()`, which the order may depend on."""
    generator = torch.Generator().manual_seed(0)

    def operand(count: int) -> Tensor:
        sizes = torch.randint(-8, 9, (count, columns), generator=generator)
        return (torch.randn(count, columns, generator=generator) * 2.0**sizes).bfloat16()

    weight = operand(rows)
    # About one result in 10^5 differs.
    blocks = max(1, 2**21 // (ROWS * rows))
    for count in (2, 17, *repeat(ROWS, blocks)):
        x = operand(count)
        if not torch.equal(F.linear(x, weight), _row_by_row(x, weight)):
            return False
    return True


def expand(shrunk: Tensor, weight: Tensor) -> Tensor:
    """Return the engine's product of x Aᵀ, BF16 [M, r], with `weight`, BF16 [N, r]."""
    if is_gpu(shrunk.device) or one_product(*weight.shape, torch.get_num_threads()):
        return F.linear(shrunk, weight)
    return torch.cat([_row_by_row(part, weight) for part in shrunk.split(ROWS)])


class _Adapter(torch.autograd.Function):
    """y + (x Aᵀ) (B factor)ᵀ, BF16 [M, N], for y [M, N], x [M, K], A [r, K] and B [N, r] in BF16.

    `factor` is a power of two, so it rounds nothing wherever the backward multiplies by it: here the smallest products.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, factor: float) -> Tensor:
        product = F.linear if is_gpu(x.device) else _row_by_row
        rank = engine_rank(len(a))
        shrunk = product(x.float(), with_rank(A, a, rank).float()).to(x.dtype)
        ctx.save_for_backward(x, a, b, shrunk[:, : len(a)])
        ctx.factor = factor
        return expand(shrunk, with_rank(B, b * factor, rank)).add_(y)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        x, a, b, shrunk = ctx.saved_tensors
        _, need_x, need_a, need_b, _ = ctx.needs_input_grad
        grad_shrunk = (grad @ b).mul_(ctx.factor)
        grad_x = grad_shrunk @ a if need_x else None
        grad_a = grad_shrunk.t() @ x if need_a else None
        grad_b = (grad.t() @ shrunk).mul_(ctx.factor) if need_b else None
        return grad, grad_x, grad_a, grad_b, None


class AdaptedLinear(nn.Module):
    """A linear with an adapter: `lora_A` [r, K] and `lora_B` [N, r], BF16. The output of the base is BF16 [..., N]."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_factor: float

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = super().forward(input)
        x = input.reshape(-1, input.shape[-1])
        if not len(x):
            return y
        rows = y.reshape(-1, y.shape[-1])
        total: Tensor = _Adapter.apply(rows, x, self.lora_A, self.lora_B, self.lora_factor)
        return total.view(y.shape)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("lora_A", "lora_B"):
            destination.pop(prefix + name)


@cache
def adapted_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a linear's class that has the same name and an adapter."""
    return type(original.__name__, (AdaptedLinear, original), {"__module__": __name__})


Shapes = dict[str, tuple[int, int]]
"""Name of a linear -> its [N, K]."""


def target_linears(model: nn.Module, targets: Sequence[str]) -> Shapes:
    """Return [N, K] of the linears that get an adapter, by name. `targets`: a value of `lora.target_modules`.

    Raise UserError if an entry matches no linear, or one that vLLM cannot serve an adapter for."""
    shapes = linear_shapes(model)
    frozen = _frozen(shapes)
    adaptable = {name: shape for name, shape in shapes.items() if name not in frozen}
    known = adapted_leaves(adaptable)
    for entry in targets:
        if entry == ALL_LINEAR:
            continue
        if why := _why_not(entry, model, adaptable, frozen):
            fix = f"choose from {', '.join(known)}, or write {ALL_LINEAR}"
            raise UserError(
                f"{entry} cannot have an adapter", where="lora.target_modules", why=why, fix=fix
            )
    return {name: shape for name, shape in adaptable.items() if is_target(name, targets)}


def _frozen(shapes: Shapes) -> dict[str, str]:
    """Return the linears that cannot have an adapter, with the reasons."""
    of_experts = {_leaf(name) for name in shapes if ".experts." in name}
    frozen = {}
    for name in shapes:
        if name == "lm_head":
            frozen[name] = "vLLM leaves adapters of lm_head out of some log-probs (vllm#51594)"
        elif name.endswith(ROUTERS):
            frozen[name] = "it routes tokens, and trainer and engine must choose the same experts"
        elif _leaf(name) in of_experts:
            frozen[name] = (
                "vLLM's kernels for low-bit experts take no adapters; their weights stay frozen"
            )
    return frozen


def _why_not(
    entry: str, model: nn.Module, adaptable: Shapes, frozen: Mapping[str, str]
) -> str | None:
    """Return why the `entry` of `lora.target_modules` chooses nothing, or something that cannot have an adapter."""
    if refused := [name for name in frozen if is_target(name, [entry])]:
        return f"{refused[0]}: {frozen[refused[0]]}"
    if entry == "experts":
        return "vLLM's kernels for low-bit experts take no adapters; their weights stay frozen"
    if is_pattern(entry):
        others = [
            name
            for name, _ in model.named_modules()
            if name and name not in adaptable and is_target(name, [entry])
        ]
        if others:
            return f"the expression also matches {others[0]}, which is no linear, and peft refuses that"
    if any(is_target(name, [entry]) for name in adaptable):
        return None
    example = next(iter(adaptable), "model.layers.0.self_attn.q_proj")
    if is_pattern(entry):
        return f"an expression must match a whole name, such as {example}, and it matches none"
    return f"no linear of this model has the name {entry}, so the adapter would train nothing"


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


class Adapters:
    """The adapters of a model, which are all that is trained. Everything else is frozen, and quantized once.

    `layers`: the linears with an adapter, by name. `targets`: as in `Adapter`."""

    def __init__(
        self,
        model: nn.Module,
        config: LoraConfig,
        *,
        seed: int,
        base: str,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
    ) -> None:
        """Freeze `model`, which is quantized and aligned, and give its linears adapters, in place. It is moved to
        `device`, layer by layer, so that its BF16 weights are never there together.

        A is random as in peft: Kaiming-uniform with a = sqrt(5), from `seed` alone, and B is zero, unless the config
        names an adapter to begin from. `base`: the name of the base model, for adapter_config.json. `dtype`: that of
        the parameters A and B. FP32 ones start at the same BF16 numbers, and something else rounds them for the
        forward."""
        assert config.r
        self.model = model
        self.rank = config.r
        self.alpha = config.alpha or config.r
        self.base = base
        device = device or next(model.parameters()).device
        model.requires_grad_(False)
        for module in model.modules():
            if isinstance(module, QuantLayer) and module.scheme.quantized:
                self._move(module, device)
                module.freeze()
        self._move(model, device)
        self.layers: dict[str, AdaptedLinear] = {}
        chosen = target_linears(model, config.target_modules)
        self.targets = peft_targets(chosen, config.target_modules)
        begun = start_tensors(config.path, chosen) if config.path else {}
        self.begun = config.path
        generator = torch.Generator().manual_seed(seed)
        for name, (rows, columns) in chosen.items():
            layer: Any = model.get_submodule(name)
            layer.__class__ = cast(Any, adapted_class)(type(layer))
            bound = 1 / math.sqrt(columns)
            start = torch.empty(self.rank, columns).uniform_(-bound, bound, generator=generator)
            where = device if is_gpu(device) else None
            a, b = begun.get(name) or (start.bfloat16(), torch.zeros(rows, self.rank))
            layer.lora_A = nn.Parameter(a.to(where, dtype))
            layer.lora_B = nn.Parameter(b.to(where, dtype))
            layer.lora_factor = config.factor
            self.layers[name] = layer

    def _move(self, module: nn.Module, device: torch.device) -> None:
        """Move the weights of `module` to `device`, but for those of frozen layers, which are there already."""
        module.to(device)

    @torch.no_grad()
    def share(self, storage: Mapping[str, Tensor]) -> None:
        """Use the tensors of `storage`, which have published names, in place of equal tensors of the base.

        Raise RuntimeError if one is not equal."""
        for module in self.model.modules():
            if isinstance(module, QuantLayer):
                module.share(storage)
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad and not parameter.is_meta:
                parameter.data = shared(name, parameter.data, storage.get(name))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all adapters (not copies) by peft's names, in their own dtype."""
        named: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            named |= {
                f"{PREFIX}{name}{A}": layer.lora_A.detach(),
                f"{PREFIX}{name}{B}": layer.lora_B.detach(),
            }
        return named

    def adapter(self) -> Adapter:
        """Return the current adapter. Its tensors are not copies."""
        tensors = self.tensors()
        return Adapter(self.rank, self.alpha, self.targets, self.base, tensors)

    def __str__(self) -> str:
        trained = sum(tensor.numel() for tensor in self.tensors().values())
        begun = f", begun from {self.begun}" if self.begun else ""
        return f"lora: r={self.rank}, {len(self.layers)} linears have adapters, {trained:,} weights are trained{begun}"
