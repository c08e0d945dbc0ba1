"""The tensors of a model under their checkpoint names, quantized: what a publish sends and an export writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from qarl.quant.convert import DEFAULT_IGNORE, owners, select_linears, tied_names
from qarl.quant.experts import STACKS, QuantExperts, is_stack, quantize_stack, unstacked
from qarl.quant.linear import QuantLinear
from qarl.quant.quantize import quantize
from qarl.schemes import Scheme


def low_bit_layers(model: nn.Module) -> dict[str, QuantLinear | QuantExperts]:
    """Return the quantized linears and the modules of quantized experts, by name."""
    kinds = (QuantLinear, QuantExperts)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def requantize(model: nn.Module) -> None:
    """Quantize every layer whose weight has changed since it was last quantized."""
    for layer in low_bit_layers(model).values():
        layer.make_ready()


def prepared_codes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the int4 codes that the kernels of the current weights multiply by, in the kernels' own layouts.

    An engine in this process that reads the same layout need not convert the tensors of `packed_state_dict` again. The
    names are those of published tensors, but end in the layout's name. Tensors are not copied."""
    codes: dict[str, torch.Tensor] = {}
    for layer in low_bit_layers(model).values():
        codes |= layer.prepared_codes()
    return codes


def packed_state_dict(
    model: nn.Module,
    *,
    scheme: Scheme | None = None,
    ignore: Sequence[str] = DEFAULT_IGNORE,
    stacks: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the model under its checkpoint name, in layer order.

    A `QuantLinear` or `QuantExperts` yields the low-bit tensors that its forward multiplies by, or in scheme bf16 its
    weights. In a model without low-bit layers (`quant.align=off`), the linears that `scheme` and `ignore` select are
    quantized here. A tied `lm_head.weight` is left out. Stacks of experts are split into matrices, as in Hugging Face
    checkpoints. `stacks`: leave them whole (`qarl.quant.experts`). `RolloutEngine.publish` takes both, but whole stacks
    are published faster.

    Tensors are not copied, so clone any that must outlive the next optimizer step.
    """
    layers: dict[str, nn.Module] = {
        name: layer for name, layer in low_bit_layers(model).items() if layer.scheme.quantized
    }
    if not layers and scheme is not None and scheme.quantized:
        layers = owners(select_linears(model, scheme, ignore)[0])
    tied = tied_names(model)
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        layer = layers.get(owner)
        if name in tied:
            continue
        if layer is None or leaf not in ("weight", *STACKS):
            yield from unquantized_tensors(name, tensor, stacks=stacks)
        elif isinstance(layer, QuantLinear):
            yield from layer.quantized().named(owner)
        elif isinstance(layer, QuantExperts):
            stack = layer.quantized()[leaf]
            yield from stack.stacked() if stacks else stack.named()
        else:
            assert scheme is not None
            yield from packed_tensor(name, tensor, scheme, stacks=stacks)


def unquantized_tensors(
    name: str, tensor: torch.Tensor, *, stacks: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield an unquantized tensor of a state dict as `packed_state_dict` does."""
    if stacks and is_stack(name, tensor.shape):
        yield f"{name}.weight", tensor
    else:
        yield from unstacked([(name, tensor)])


@torch.no_grad()
def packed_tensor(
    name: str, tensor: torch.Tensor, scheme: Scheme, *, stacks: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Quantize `tensor`, the weight of a linear or of a stack of experts, and yield the wire tensors."""
    if is_stack(name, tensor.shape):
        stack = quantize_stack(tensor.detach(), scheme, name=name)
        yield from stack.stacked() if stacks else stack.named()
    else:
        yield from quantize(tensor.detach(), scheme, name=name).named(name.rpartition(".")[0])
