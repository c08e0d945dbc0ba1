"""QuantLinear: a linear whose forward uses the rollout engine's low-bit tensors, with a straight-through backward.

    forward   y  = GEMM_lowbit(x, Q(W)) + b    a kernel of qarl.kernels.registry, on the published tensors themselves
    backward  dX = dY Ŵ                        Ŵ: the forward's weight, dequantized to BF16
              dW = dYᵀ X̂,  db = sum of dY      X̂: the activations, dequantized to BF16 if the forward quantized them

The backward ignores the rounding of x and of the master weight (arXiv 2604.07853, section 3.1). verl's QAT (fake
quantization) also rounds the weight, but multiplies in BF16. `weight` stays an ordinary parameter, so optimizers,
checkpoints and FSDP need no change.

The weight is quantized once per optimizer step. Autograd's version counter tells whether it has changed. In-place
updates advance the counter of a tensor. Some optimizers do not: fused ones (torch 2.13: AdamW with fused=True), and on
DTensors also foreach ones, torch's default on GPUs. So `watch_optimizers` advances the counters of an optimizer's
parameters after each of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from qarl.errors import UserError
from qarl.kernels.base import Tensors, from_layout, to_layout
from qarl.kernels.registry import Choice, choose_linear_kernel
from qarl.quant.quantize import QuantizedTensor, phase, quantize
from qarl.schemes import Scheme
from qarl.schemes.kernel_choice import KernelChoice


@cache
def watch_optimizers() -> None:
    """Advance the version counters of all parameters that any torch optimizer steps. A second call changes nothing."""

    def advance(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            torch.autograd.graph.increment_version(group["params"])

    register_optimizer_step_post_hook(advance)


Mark = tuple[torch.Tensor, int, int]
"""The state of a weight: the parameter, its address, and autograd's version counter. A mark keeps its parameter alive.
Otherwise a new parameter could get the same address and the same version."""


def shared(name: str, own: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """Return the engine's tensor `other`, or `own` if the engine has none with the dtype and shape of `own`.

    `name`: the published name, for the RuntimeError that is raised if the two are not equal."""
    if other is None or (other.dtype, other.shape) != (own.dtype, own.shape):
        return own
    bits = torch.uint8 if own.itemsize == 1 else own.dtype  # PyTorch does not compare FP8
    if not torch.equal(own.view(bits), other.view(bits)):
        raise RuntimeError(f"the engine has another {name} than the trainer has published")
    return other


class QuantLayer(nn.Module):
    """Base of `QuantLinear` and `QuantExperts`.

    The weights are quantized when a storage or a version counter has changed, so once per optimizer step. After writing
    through `.data`, which does not advance the counter, call `invalidate_quantized`.
    """

    WEIGHTS: ClassVar[tuple[str, ...]]
    """Names of the parameters that are quantized."""
    DERIVED: ClassVar[tuple[str, ...]]
    """Names of the attributes that are computed from the weights. They are None until the first use."""
    multiplies: ClassVar[str]
    """What multiplies, in an error."""
    scheme: Scheme
    qualified_name: str
    choice: Choice
    stores_layout: ClassVar[bool] = False
    """Whether `freeze` stores int4 tensors in the kernel's layout, and not as published."""
    stored: dict[str, dict[str, torch.Tensor]] | None = None
    """All that is left of the weights of a frozen layer (`freeze`): their low-bit tensors without `weight_shape`, as
    published or in the kernel's layout, by the weights' names."""
    _marks: tuple[Mark, ...]

    def _choose(self, scheme: Scheme, qualified_name: str, choice: Choice) -> None:
        watch_optimizers()
        self.scheme = scheme
        self.qualified_name = qualified_name
        self.choice = choice
        self._generation = 0
        QuantLayer.invalidate(self)

    @property
    def kernel(self) -> Any:
        return self.choice.kernel

    @property
    def generation(self) -> int:
        """How many times the weights were quantized."""
        return self._generation

    @property
    def stale(self) -> bool:
        """Whether a weight was changed or replaced since it was quantized."""
        weights = [getattr(self, name) for name in self.WEIGHTS]
        return not self._marks or not all(
            weight is marked and weight.data_ptr() == address and weight._version == version
            for weight, (marked, address, version) in zip(weights, self._marks, strict=True)
        )

    def _mark(self) -> None:
        """Note that the weights have just been quantized."""
        self._generation += 1
        weights = [getattr(self, name) for name in self.WEIGHTS]
        self._marks = tuple((weight, weight.data_ptr(), weight._version) for weight in weights)

    def make_ready(self) -> None:
        """Quantize the weights for a forward, if they have changed."""
        if self.stored is None:
            self.quantized()

    def quantized(self) -> Any:
        """Return the low-bit tensors of the current weights, for the forward and the publisher. A frozen layer restores
        them if they are in its kernel's layout."""
        raise NotImplementedError

    def by_weight(self) -> Mapping[str, Any]:
        """Return what `quantized` returns for each weight, by the weights' names."""
        raise NotImplementedError

    def published_as(self, name: str) -> str:
        """Return the name under which the weight `name` is published."""
        raise NotImplementedError

    def in_layout(self) -> Mapping[str, Tensors]:
        """Return what the kernel of a trained layer multiplies by, for each weight, as tensors in the kernel's layout.
        It is empty for kernels that do not show it."""
        raise NotImplementedError

    def prepared_codes(self) -> dict[str, torch.Tensor]:
        """Return the int4 codes that the next forward multiplies by, in the kernel's layout, under published names with
        the layout's name at the end (`NAME.weight_tiles`). They share the memory of the layer."""
        layout = self.kernel.layout
        if layout is None or self.frozen or self.stale:
            return {}
        return {
            f"{self.published_as(name)}.{layout.codes}": tensors[layout.codes]
            for name, tensors in self.in_layout().items()
            if layout.codes in tensors
        }

    @property
    def frozen(self) -> bool:
        return self.stored is not None

    def freeze(self) -> None:
        """Quantize the weights for the last time, and free them: their parameters move to the meta device. One copy of
        the low-bit tensors stays. Each forward or backward converts it if it has another layout. A layer that is frozen
        already stays as it is."""
        if not self.frozen:
            self._store(self.by_weight())

    def adopt(self, quantized: Mapping[str, Any], device: torch.device | None = None) -> None:
        """Freeze the layer with tensors that somebody else has quantized, by the weights' names, on `device`. Its own
        weights may be on the meta device, and are dropped."""
        self._store(quantized)
        if device is not None and self.stored is not None:
            for tensors in self.stored.values():
                tensors.update({leaf: tensor.to(device) for leaf, tensor in tensors.items()})

    def _store(self, quantized: Mapping[str, Any]) -> None:
        self.stored = {}
        layout = self.kernel.layout if self.stores_layout else None
        for name, weight in quantized.items():
            tensors = to_layout(weight.tensors, layout, weight.shape)
            self.stored[name] = {
                leaf: tensor for leaf, tensor in tensors.items() if leaf != "weight_shape"
            }
            setattr(
                self,
                name,
                nn.Parameter(getattr(self, name).detach().to("meta"), requires_grad=False),
            )
        for attribute in self.DERIVED:
            setattr(self, attribute, None)
        self._mark()

    def share(self, storage: Tensors) -> None:
        """If the layer is frozen, replace each stored weight by that of an engine's `storage`, if it is there.

        The engine's may be in the kernel's layout. Raise RuntimeError if they are not equal."""
        stored = self.stored or {}
        layout = self.kernel.layout
        for name, tensors in stored.items():
            prefix = self.published_as(name)
            own: Tensors = tensors
            if layout is not None and f"{prefix}.{layout.codes}" in storage:
                own = to_layout(own, layout, tuple(getattr(self, name).shape))
            stored[name] = {
                leaf: shared(f"{prefix}.{leaf}", t, storage.get(f"{prefix}.{leaf}"))
                for leaf, t in own.items()
            }

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Do the same as `nn.Module`, but leave alone what is on the meta device, if the layer is frozen."""
        return super()._apply((lambda t: t if t.is_meta else fn(t)) if self.frozen else fn, recurse)

    def invalidate(self) -> None:
        """Drop the quantized tensors. The next use makes them again. Raise RuntimeError if the layer is frozen."""
        if self.frozen:
            raise RuntimeError(
                f"{self.qualified_name} is frozen, so its weights cannot be quantized again"
            )
        self._marks = ()
        for name in self.DERIVED:
            setattr(self, name, None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the quantized tensors out of copies and pickles, because a kernel may own their memory."""
        if self.frozen:
            raise RuntimeError(f"{self.qualified_name} is frozen, so it cannot be copied")
        return {**self.__dict__, "_marks": (), **dict.fromkeys(self.DERIVED)}

    def check_input(self, dtype: torch.dtype) -> None:
        if dtype != torch.bfloat16:
            raise UserError(
                f"{self.qualified_name} got {dtype} activations",
                why=f"the {self.multiplies} multiply BF16 activations, as the rollout engine does",
                fix="run the model in bfloat16, without autocast to a different dtype",
            )

    def check_unchanged(self, generation: int) -> None:
        """Raise RuntimeError unless the weights are those of the forward, which had this `generation`."""
        if self.generation != generation or self.stale:
            raise RuntimeError(
                f"{self.qualified_name} changed between its forward and its backward"
            )


class _StraightThroughLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: QuantLinear,
    ) -> Any:
        ctx.save_for_backward(x)
        ctx.layer = layer
        ctx.generation = layer.generation
        return layer.multiply(x, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (x,), layer = grad_outputs, ctx.saved_tensors, ctx.layer
        layer.check_unchanged(ctx.generation)
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        return (
            layer.input_gradient(grad) if need_x else None,
            grad.t() @ layer.kernel.dequantized_input(x) if need_weight else None,
            grad.sum(0) if need_bias else None,
            None,
        )


class QuantLinear(QuantLayer, nn.Linear):
    """`nn.Linear` whose forward is a low-bit GEMM. Weight [N, K] and activations [..., K] are BF16."""

    WEIGHTS = ("weight",)
    DERIVED = ("_quantized", "_dequantized", "prepared")
    multiplies = "low-bit kernels"
    _quantized: QuantizedTensor | None
    _dequantized: torch.Tensor | None
    prepared: Any

    def __init__(
        self,
        linear: nn.Linear,
        scheme: Scheme,
        *,
        qualified_name: str,
        kernel: str | None = None,
        kernels: KernelChoice = KernelChoice.ENGINE,
        device: torch.device | None = None,
    ) -> None:
        """Take over the parameters of `linear` without a copy.

        `qualified_name`: the name to show in errors. `kernel`: the only kernel to consider. `kernels`: a value of
        `quant.kernels`. `device`: where the forward will run, by default the device of the weight.
        """
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        choice = choose_linear_kernel(
            scheme,
            device or linear.weight.device,
            (linear.out_features, linear.in_features),
            force=kernel,
            kernels=kernels,
        )
        self._choose(scheme, qualified_name, choice)

    def quantized(self) -> QuantizedTensor:
        if self.stored is not None:
            tensors = from_layout(self.stored["weight"], self.kernel.layout)
            return QuantizedTensor.of(self.scheme, (self.out_features, self.in_features), tensors)
        if self._quantized is None or self.stale:
            with torch.no_grad():
                quantized = quantize(
                    self.weight.detach(), self.scheme, name=f"{self.qualified_name}.weight"
                )
                with phase("prepare"):
                    self.prepared = self.kernel.prepare(quantized.tensors)
            self._quantized = quantized
            self._dequantized = None
            self._mark()
        return self._quantized

    def by_weight(self) -> dict[str, QuantizedTensor]:
        return {"weight": self.quantized()}

    def in_layout(self) -> dict[str, Tensors]:
        return {"weight": self.kernel.in_layout(self.prepared)}

    def published_as(self, name: str) -> str:
        return self.qualified_name

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return y [M, N] BF16 from x [M, K] BF16."""
        prepared = self.prepared
        if self.stored is not None:
            with phase("prepare"):
                prepared = self.kernel.prepare_gathered(self.stored["weight"])
        return self.kernel.linear(x, prepared, bias)

    def input_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return dX = dY Ŵ, BF16 [M, K], from `grad` [M, N]. Some kernels compute it from the low-bit tensors."""
        if self.kernel.computes_input_gradient:
            return self.kernel.backward_input(grad, self.quantized().tensors)
        return grad @ self.dequantized

    @property
    def dequantized(self) -> torch.Tensor:
        """Ŵ [N, K] in BF16, for kernels that do not compute dX. It is made in the first backward after an update. A
        frozen layer makes it in every backward, and does not keep it."""
        if self._dequantized is not None:
            return self._dequantized
        quantized = self.quantized()
        weight = None if self.frozen else self.kernel.dequantized_weight(self.prepared)
        dequantized = quantized.dequantize(torch.bfloat16) if weight is None else weight
        if not self.frozen:
            self._dequantized = dequantized
        return dequantized

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.check_input(input.dtype)
        self.make_ready()
        x = input.reshape(-1, self.in_features)
        if not len(x):  # a model's own router may give a layer no tokens; the kernels need one
            return nn.functional.linear(input, self.weight, self.bias)
        y = _StraightThroughLinear.apply(x, self.weight, self.bias, self)
        return y.view(*input.shape[:-1], self.out_features)
