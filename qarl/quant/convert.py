"""Convert a model to quantized layers.

`quantize_model` replaces `nn.Linear` with `QuantLinear`, and the experts of a layer with `QuantExperts`, in place. It
and `packed_state_dict` (`qarl.quant.state_dict`) call `select_linears`, so they always agree on which linears are
quantized.

Each expert's gate_proj, up_proj and down_proj counts as a linear, under its checkpoint name. Routers and the gates of
shared experts are never quantized.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qarl.config.ignored_layers import is_ignored, resolve_ignored
from qarl.errors import UserError
from qarl.quant.experts import STACKS, QuantExperts, matrices, stacked_experts
from qarl.quant.linear import QuantLinear
from qarl.schemes import DEFAULT_SCHEME, Scheme, get_scheme
from qarl.schemes.kernel_choice import KernelChoice

DEFAULT_IGNORE = ("lm_head",)
FUSED_LAYERS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""vLLM loads these as one layer, in every model family that QaRL trains."""


@dataclass(frozen=True)
class QuantReport:
    """The result of a conversion.

    `quantized`: quantized linears (name -> kernel). `skipped`: linears that were not quantized (name -> reason).
    `unmatched_ignore`: ignore entries that matched nothing. `experts`: quantized layers of experts (name -> kernel).
    `kernels`: the value of `quant.kernels`."""

    scheme: Scheme
    quantized: dict[str, str]
    skipped: dict[str, str]
    unmatched_ignore: tuple[str, ...]
    experts: dict[str, str] = field(default_factory=dict)
    kernels: KernelChoice = KernelChoice.ENGINE

    def __str__(self) -> str:
        experts = f" and the experts of {len(self.experts)} layers" if self.experts else ""
        name = (
            self.scheme.name
            if self.kernels.by_engine
            else f"{self.scheme.name}, quant.kernels={self.kernels}"
        )
        lines = [f"{name}: {len(self.quantized)} linears{experts} quantized"]
        lines[0] += f", {len(self.skipped)} left alone"
        kernels = {
            *self.quantized.values(),
            *(f"of experts {kernel}" for kernel in self.experts.values()),
        }
        lines += [f"  kernel {kernel}" for kernel in sorted(kernels)]
        skipped = {
            re.sub(r"[.]experts[.][0-9]+[.]", ".experts.*.", name): why
            for name, why in self.skipped.items()
        }
        lines += [f"  left alone: {name} ({reason})" for name, reason in skipped.items()]
        lines += [
            f"  quant.ignore entry {entry!r} matches no linear" for entry in self.unmatched_ignore
        ]
        return "\n".join(lines)


def select_linears(
    model: nn.Module, scheme: Scheme, ignore: Sequence[str] = DEFAULT_IGNORE
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return two dicts: the linears to quantize (name -> module with the weight), and the others (name -> reason).

    Each matrix of an expert is listed as a linear. Its module is the one that contains all experts of the layer. Raises
    UserError if the shapes of some linears do not fit `scheme`, or if `ignore` covers only some of a layer's experts.
    """
    selected: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    problems = []
    for name, (module, shape) in _linears(model).items():
        if not scheme.quantized:
            skipped[name] = "scheme bf16"
        elif name.endswith(ROUTERS):
            skipped[name] = "routes tokens"
        elif is_ignored(name, ignore):
            skipped[name] = "in quant.ignore"
        else:
            problem = scheme.check_shape(name, *shape)
            if problem is not None:
                problems.append(problem)
            selected[name] = module
    if problems:
        raise UserError(
            f"{len(problems)} linears cannot be quantized to {scheme.name}",
            where="; ".join(problems[:4]) + ("; ..." if len(problems) > 4 else ""),
            why=f"weights are quantized in groups of group_size={scheme.group_size} along the input dimension",
            fix="choose a quant.group_size that divides every input size, or add these layers to quant.ignore",
        )
    check_whole_experts(selected, skipped)
    return selected, skipped


ROUTERS = (".mlp.gate", ".shared_expert_gate")
"""Endings of the names of routers and of shared experts' gates. Some model families have them as linears."""


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return [N, K] of every linear of `model`, including the matrices of each expert, by checkpoint name."""
    return {name: shape for name, (_, shape) in _linears(model).items()}


def _linears(model: nn.Module) -> dict[str, tuple[nn.Module, tuple[int, int]]]:
    """Return (module, [N, K]) of every linear and of every matrix of an expert, by name, in the model's order."""
    experts = stacked_experts(model)
    linears: dict[str, tuple[nn.Module, tuple[int, int]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            linears[name] = (module, (module.out_features, module.in_features))
        elif name in experts:
            for leaf in STACKS:
                shape = tuple(module.get_parameter(leaf).shape)
                for matrix in matrices(f"{name}.{leaf}", shape):
                    linears[matrix.name] = (
                        module,
                        (matrix.rows.stop - matrix.rows.start, shape[2]),
                    )
    return linears


def check_whole_experts(quantized: Iterable[str], skipped: Iterable[str]) -> None:
    """Raise UserError if a layer has matrices of experts both in `quantized` and in `skipped` (names of linears)."""
    layers: list[dict[str, str]] = []
    for names in (quantized, skipped):
        matches = ((re.match(r"(.*[.]experts)[.][0-9]+[.]", name), name) for name in names)
        layers.append({match[1]: name for match, name in matches if match})
    if split := sorted(layers[0].keys() & layers[1].keys()):
        raise UserError(
            f"quant.ignore covers only some of the experts in {len(split)} layers",
            where=f"{split[0]}: ignored: {layers[1][split[0]]}; quantized: {layers[0][split[0]]}",
            why="vLLM uses one scheme for all experts of a layer",
            fix='ignore all experts of a layer, as in "re:model[.]layers[.]0[.]mlp[.]experts[.]", or none',
        )


def quantize_model(
    model: nn.Module,
    *,
    scheme: str | Scheme = DEFAULT_SCHEME,
    group_size: int = 128,
    ignore: Sequence[str] = DEFAULT_IGNORE,
    kernels: KernelChoice = KernelChoice.ENGINE,
    device: torch.device | None = None,
) -> QuantReport:
    """Quantize `model` in place: replace linears with `QuantLinear` and experts with `QuantExperts`.

    Parameters keep their names. `kernels`: a value of `quant.kernels`. `device`: where the model will run, if not where
    it is. Raises UserError if a weight is not BF16 or no kernel supports a layer, and for the reasons given at
    `select_linears`.
    """
    if isinstance(ignore, str):
        raise UserError(
            f"ignore is the text {ignore!r}",
            why="it is a list of names",
            fix=f"write ignore=[{ignore!r}]",
        )
    if not isinstance(scheme, Scheme):
        scheme = get_scheme(scheme, group_size=group_size)
    selected, skipped = select_linears(model, scheme, ignore)
    for name, module in owners(selected).items():
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf in ("weight", *STACKS) and parameter.dtype != torch.bfloat16:
                raise UserError(
                    f"{name}.{leaf} is {parameter.dtype}, not bfloat16",
                    why="the low-bit kernels multiply BF16 activations, and only BF16 weights are quantized for them",
                    fix="load the model with dtype=torch.bfloat16; FP32 masters live in the optimizer "
                    "(optim.master_dtype)",
                )
    classes = QuantLinear, QuantExperts
    return replace_selected(
        model, selected, skipped, scheme, ignore, *classes, kernels=kernels, device=device
    )


def replace_selected(
    model: nn.Module,
    selected: Mapping[str, nn.Module],
    skipped: dict[str, str],
    scheme: Scheme,
    ignore: Sequence[str],
    linear_class: type[QuantLinear],
    experts_class: type[QuantExperts],
    *,
    device: torch.device | None = None,
    kernels: KernelChoice = KernelChoice.ENGINE,
) -> QuantReport:
    """Replace each linear of `selected` with a `linear_class`, and each module of experts with an `experts_class`."""
    linears: dict[str, str] = {}
    experts: dict[str, str] = {}
    for name, module in owners(selected).items():
        if isinstance(module, nn.Linear):
            linear = linear_class(
                module, scheme, qualified_name=name, kernels=kernels, device=device
            )
            model.set_submodule(name, linear)
            linears[name] = linear.choice.reason
        else:
            layer = experts_class(
                module, scheme, qualified_name=name, kernels=kernels, device=device
            )
            model.set_submodule(name, layer)
            experts[name] = layer.choice.reason
    unmatched = (
        tuple(resolve_ignored([*selected, *skipped], ignore).unmatched) if scheme.quantized else ()
    )
    return QuantReport(scheme, linears, skipped, unmatched, experts, kernels)


def owners(selected: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return each module of `selected` once, by its own name. `selected` lists a module of experts once per matrix."""
    return {
        name if isinstance(module, nn.Linear) else name.rsplit(".", 2)[0]: module
        for name, module in selected.items()
    }


def tied_names(model: nn.Module) -> frozenset[str]:
    """Return the second names of tied parameters, such as the output embedding of a tied model."""
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return frozenset()
    canonical = {name for name, _ in model.named_parameters()}
    return frozenset(
        name for name, _ in model.named_parameters(remove_duplicate=False) if name not in canonical
    )


def invalidate_quantized(model: nn.Module) -> None:
    """Drop all quantized tensors. Call it after writes that autograd does not count (`.data`, shared memory)."""
    for module in model.modules():
        if isinstance(module, QuantLinear | QuantExperts):
            module.invalidate()


@contextmanager
def published_forward(
    model: nn.Module,
    scheme: Scheme,
    ignore: Sequence[str],
    *,
    kernels: KernelChoice = KernelChoice.ENGINE,
) -> Iterator[None]:
    """Let the linears and experts that `scheme` quantizes multiply by low-bit tensors, in forwards without gradients.

    At level `off` the trainer's forward is plain BF16, so its mismatch contains the whole error of quantization. The
    guard (`qarl.metrics.mismatch_limit`) must not judge that error, and therefore compares the engine with this
    forward.

    A layer is quantized during its forward and its tensors are dropped after it, so memory grows by one layer, and the
    weight may be one that FSDP has gathered for this forward. Layers that are quantized already stay as they are.
    `kernels`: a value of `quant.kernels`.
    """

    def low_bit(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> torch.Tensor:
        layer: nn.Module
        if isinstance(module, nn.Linear):
            layer = QuantLinear(module, scheme, qualified_name=name, kernels=kernels)
        else:
            layer = QuantExperts(module, scheme, qualified_name=name, kernels=kernels)
        result: torch.Tensor = layer(*inputs)
        return result

    selected = owners(select_linears(model, scheme, ignore)[0])
    with ExitStack() as stack:
        for name, module in selected.items():
            if isinstance(module, QuantLinear | QuantExperts):
                continue
            handle = module.register_forward_hook(
                lambda module, inputs, _, name=name: low_bit(name, module, inputs)
            )
            stack.callback(handle.remove)
        yield
