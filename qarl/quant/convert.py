"""Which linears of a model become quantized: one walk, one matcher, one report; and the wire tensors of the whole
model.

`quantize_model` swaps `nn.Linear` for `QuantLinear` in place. `packed_state_dict` yields what a rollout engine loads
and what a checkpoint stores, in compressed-tensors names. Both take their decision from the same `select_linears`,
so the trainer, the wire and the checkpoint cannot disagree on what is quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from qarl.config.ignore import is_ignored, resolve_ignored
from qarl.errors import UserError
from qarl.quant.linear import QuantLinear
from qarl.quant.scheme import Scheme, get_scheme

DEFAULT_IGNORE = ("lm_head",)


@dataclass(frozen=True)
class QuantReport:
    """Layers quantized (name -> kernel), layers left alone (name -> why), and ignore entries that matched nothing."""

    scheme: Scheme
    quantized: dict[str, str]
    skipped: dict[str, str]
    unmatched_ignore: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.scheme.name}: {len(self.quantized)} linears quantized, {len(self.skipped)} left alone"]
        lines += [f"  kernel {kernel}" for kernel in sorted(set(self.quantized.values()))]
        lines += [f"  left alone: {name} ({reason})" for name, reason in self.skipped.items()]
        lines += [f"  quant.ignore entry {entry!r} matches no linear" for entry in self.unmatched_ignore]
        return "\n".join(lines)


def select_linears(
    model: nn.Module, scheme: Scheme, ignore: Sequence[str] = DEFAULT_IGNORE
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """The linears that `scheme` quantizes, and why each other one is not.

    Raises:
        UserError: a linear that should be quantized has a shape the scheme cannot hold; every such layer is named.
    """
    selected: dict[str, nn.Linear] = {}
    skipped: dict[str, str] = {}
    problems = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if not scheme.quantized:
            skipped[name] = "scheme bf16"
        elif is_ignored(name, ignore):
            skipped[name] = "in quant.ignore"
        else:
            problem = scheme.check_shape(name, module.out_features, module.in_features)
            if problem is not None:
                problems.append(problem)
            selected[name] = module
    if problems:
        raise UserError(
            f"{len(problems)} linears cannot be quantized to {scheme.name}",
            where="; ".join(problems[:4]) + ("; ..." if len(problems) > 4 else ""),
            why=f"the scheme groups weights along the input dimension by group_size={scheme.group_size}",
            fix="choose a quant.group_size that divides every input size, or add these layers to quant.ignore",
        )
    return selected, skipped


def quantize_model(
    model: nn.Module,
    *,
    scheme: str | Scheme = "w4a16",
    group_size: int = 128,
    ignore: Sequence[str] = DEFAULT_IGNORE,
) -> QuantReport:
    """Replace the selected `nn.Linear` modules of `model` by `QuantLinear`, in place; parameters and their names stay.

    The weights must be BF16: the forward sees BF16, and what the forward sees is what is quantized.
    """
    if not isinstance(scheme, Scheme):
        scheme = get_scheme(scheme, group_size=group_size)
    selected, skipped = select_linears(model, scheme, ignore)
    kernels: dict[str, str] = {}
    for name, linear in selected.items():
        if isinstance(linear, QuantLinear):
            raise UserError(f"{name} is quantized already", why="quantize_model ran twice", fix="call it once")
        if linear.weight.dtype != torch.bfloat16:
            raise UserError(
                f"{name}.weight is {linear.weight.dtype}, not bfloat16",
                why="the low-bit kernels multiply BF16 activations; the forward's own BF16 weight is quantized",
                fix="load the model with dtype=torch.bfloat16; FP32 masters live in the optimizer (optim.master_dtype)",
            )
        layer = QuantLinear(linear, scheme, qualified_name=name)
        model.set_submodule(name, layer)
        kernels[name] = layer.choice.reason
    names = [*selected, *skipped]
    unmatched = tuple(resolve_ignored(names, ignore).unmatched) if scheme.quantized else ()
    return QuantReport(scheme, kernels, skipped, unmatched)


def packed_state_dict(
    model: nn.Module, *, scheme: Scheme | None = None, ignore: Sequence[str] = DEFAULT_IGNORE
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model under its checkpoint name, quantized linears as their low-bit tensors, in layer order.

    A `QuantLinear` yields the tensors its forward multiplies by. For a model that was not converted
    (`quant.align=off`), give `scheme` and `ignore`: the selected linears are then quantized here, by the same
    function. A tied `lm_head.weight` is left out, as in Hugging Face checkpoints. Tensors are not copied: clone what
    must outlive the next optimizer step.
    """
    from qarl.quant.quantize import quantize

    layers: dict[str, nn.Linear] = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    if scheme is not None and scheme.quantized:
        layers = select_linears(model, scheme, ignore)[0]
    tied = tied_names(model)
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        layer = layers.get(owner)
        if name in tied:
            continue
        if layer is None or leaf != "weight":
            yield name, tensor
        elif isinstance(layer, QuantLinear):
            yield from layer.quantized().named(owner)
        else:
            assert scheme is not None
            with torch.no_grad():
                yield from quantize(layer.weight.detach(), scheme, name=name).named(owner)


def tied_names(model: nn.Module) -> frozenset[str]:
    """Names whose tensor is another parameter under a second name: the output embedding of a tied model."""
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return frozenset()
    canonical = {name for name, _ in model.named_parameters()}
    return frozenset(name for name, _ in model.named_parameters(remove_duplicate=False) if name not in canonical)


__all__ = ["DEFAULT_IGNORE", "QuantReport", "packed_state_dict", "quantize_model", "select_linears", "tied_names"]
