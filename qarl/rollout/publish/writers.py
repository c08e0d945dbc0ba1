"""Write published tensors into the parameters of vLLM's modules, inside vLLM's worker. There are two ways:

- Direct: QaRL writes the weight into the engine's storage. This works for every layer on CPU, dense
  (`qarl.rollout.publish.cpu_layers`) or experts with QaRL's plugin for vLLM, and for experts on GPUs
  (`qarl.rollout.publish.experts`). It is faster than a reload, which unpacks and packs every int4 weight in Python.
  After an exception the same write can be repeated.
- Layerwise reload: vLLM's own function loads the weight. It is used for all other layers, such as GPUs' dense ones. It
  moves a module's parameters to the meta device and back. So an exception during the reload breaks the engine
  permanently (`ReloadFailed`). CUDA graphs need the other tensors of the module at their old addresses too
  (`qarl.rollout.publish.graph_addresses`).

After a layerwise reload, W8A8 layers on CPU return NaN. Their oneDNN handler keeps the raw address of the scales
(csrc/cpu/dnnl_helper.cpp), but the reload frees the scales. So these layers are written directly or refused.

Under tensor parallelism each worker of an engine gets whole tensors and writes its part
(`qarl.rollout.publish.tensor_parallel`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import nn

from qarl.errors import UserError
from qarl.kernels.cpu.vllm_linears import TILES
from qarl.rollout.publish import cpu_layers, experts, graph_addresses
from qarl.rollout.publish.experts import holds_experts
from qarl.rollout.publish.manifest import WRAPPED, Manifest, NamedTensor, unit_of, without_wrappers
from qarl.rollout.publish.stored_layer import StoredLayer, find_layer, kernel_of
from qarl.rollout.publish.tensor_parallel import Cut, Part, cut_of_split
from qarl.vllm_versions import loaded_below


class ReloadFailed(UserError):
    """vLLM's layerwise reload failed. The module that was being loaded is broken, so a new engine is needed."""

    remedy = (
        "call RolloutEngine.rebuild() for a new engine (rollout.rebuild_on_failure=true does so in a run), "
        "or start the run again, which resumes from its last checkpoint"
    )

    def __init__(self, what: str, *, why: str) -> None:
        super().__init__(what, why=why, fix=self.remedy)


class TensorsMoved(ReloadFailed):
    """A publish moved tensors that CUDA graphs have captured. A new engine would have the same fault."""

    remedy = "set rollout.enforce_eager=true, which runs without graphs"


@dataclass
class Target:
    """One vLLM module. `stored`: how QaRL writes it, or None for layerwise reload. `cut`: a function
    that returns this worker's part of whole tensors. `parts`: the checkpoint modules in `module`, in order. There are
    several if vLLM fuses them."""

    name: str
    module: nn.Module
    stored: StoredLayer | None = None
    cut: Cut | None = None
    parts: list[str] = field(default_factory=list)

    def write(self, parts: list[Part], prepared: Mapping[str, torch.Tensor]) -> None:
        """`prepared`: see `WritePlan.write`."""
        assert self.stored is not None and self.cut is not None
        shares = self.cut(self.module, parts)
        is_whole = shares is parts
        if is_whole and self.stored.takes_tiles:
            shares = [
                self._with_codes(*pair, prepared) for pair in zip(self.parts, parts, strict=True)
            ]
        self.stored.write(self.module, shares)

    def _with_codes(self, owner: str, part: Part, prepared: Mapping[str, torch.Tensor]) -> Part:
        """Return the tensors of the checkpoint module `owner`, with its prepared codes if there are any."""
        codes = prepared.get(f"{owner}.{TILES.codes}")
        return part if codes is None else part | {TILES.codes: codes}


DERIVED = {
    "cos_sin_cache": "of the rotary embedding, computed from the config",
    "inv_freq": "of the rotary embedding, computed from the config",
    "normalizer": "of Gemma's embedding, computed from the config",
    **dict.fromkeys(
        ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"),
        "always 1: the KV cache is not quantized",
    ),
    "weight_shape": "of a packed weight, known from the config",
    "w13_weight_shape": "of packed experts, known from the config",
    "w2_weight_shape": "of packed experts, known from the config",
    "azp_adj": "computed from weight and scale, used only for asymmetric activations",
    "bias_fp32": "computed from the bias",
    "_expert_map": "of expert parallelism, computed from the config",
    "expert_mask": "of expert parallelism, computed from the config",
}
"""Parameters and buffers of the engine that are not published -> a description."""


class WritePlan:
    """The module of the engine's `model` for every tensor of `expected`, and the way to write it.

    `direct=False`: use vLLM's layerwise reload for all modules except those that it would corrupt.

    Raises:
        UserError: a tensor has no place in the engine's model; no tensor is published for a parameter or buffer of the
            engine; or the engine computes a different scheme.
    """

    def __init__(
        self, model: nn.Module, vllm_config: Any, expected: Manifest, *, direct: bool = True
    ) -> None:
        self.model = model
        self.vllm_config = vllm_config
        self.by_owner: dict[str, Target] = {}
        self.modules = dict(without_wrappers(model))
        wrapped = [module for name, module in model.named_modules() if name.endswith(WRAPPED)]
        self._inner = dict.fromkeys(wrapped, loaded_below(WRAPPED))
        for target in self._find_targets(expected):
            target.cut = cut_of(target.module, len(target.parts))
            if holds_experts(target.module):
                target.parts.sort(key=experts.stack_number)
            target.stored = self._stored_layer(target, expected, direct)
        self._check_all_written(expected)

    def _find_targets(self, expected: Manifest) -> Collection[Target]:
        """Find the module of each published tensor, for `by_owner`. Return the modules."""
        fused: dict[str, list[str]] = getattr(self.model, "packed_modules_mapping", {})
        fused_into: dict[str, str] = {}
        for whole, parts in fused.items():
            fused_into |= dict.fromkeys(parts, whole)
        targets: dict[str, Target] = {}
        for name in expected:
            owner = name.rpartition(".")[0]
            if owner in self.by_owner:
                continue
            found = _module_of(owner, self.modules, fused_into)
            if found is None:
                raise UserError(
                    f"{name} has no place in the engine's model",
                    where=type(self.model).__name__,
                    why=f"the engine's model has neither a module {owner} nor a fused layer that contains it",
                    fix="use a different model, and report this one: QaRL cannot publish to its family yet",
                )
            target = targets.setdefault(found, Target(found, self.modules[found]))
            target.parts.append(owner)
            self.by_owner[owner] = target
        return targets.values()

    def _stored_layer(self, target: Target, expected: Manifest, direct: bool) -> StoredLayer | None:
        """Return how the module of `target` is written, or None if vLLM's layerwise reload does it."""
        module = target.module
        if _is_on_cpu(module):
            return _stored_on_cpu(target, direct)
        if not direct or target.cut is None or not holds_experts(module):
            return None
        specs = [_without_memory(expected, owner) for owner in target.parts]
        parts = target.cut(module, specs)
        return experts.stored_on_gpu(module, parts, self.vllm_config, DERIVED)

    def storage(self, expected: Manifest) -> dict[str, torch.Tensor]:
        """Return what a `StoredLayer` can show of the engine's weights, as views of its memory. Names are those of
        a publish, or of a kernel's layout. With several workers or on a GPU nothing is shown."""
        if self.vllm_config.parallel_config.world_size > 1:
            return {}
        rows: dict[str, int] = {}
        for name, spec in expected.items():
            owner, _, leaf = name.rpartition(".")
            if leaf in ("weight", "weight_packed"):
                rows[owner] = spec.shape[0]
        targets = {target.name: target for target in self.by_owner.values()}
        views: dict[str, torch.Tensor] = {}
        for target in targets.values():
            reader = target.stored.read if target.stored else None
            if reader is None or not rows.keys() >= set(target.parts):
                continue
            parts = reader(target.module, [rows[owner] for owner in target.parts])
            for owner, part in zip(target.parts, parts, strict=True):
                views |= {f"{owner}.{leaf}": tensor for leaf, tensor in part.items()}
        return views

    def _check_all_written(self, expected: Manifest) -> None:
        """Raise UserError if a parameter or buffer is not published, shares no memory with a published one, and is not
        in `DERIVED`."""
        published: set[tuple[str, str]] = set()
        for name in expected:
            owner, _, leaf = name.rpartition(".")
            target = self.by_owner[owner]
            stored = experts.stored_as(owner, leaf) if holds_experts(target.module) else leaf
            published.add((target.name, stored))
        # Layerwise reload derives all of a module's tensors from the published ones, except a bias.
        reloaded = {target.name for target in self.by_owner.values() if target.stored is None}
        tensors = {
            (owner, name): tensor
            for owner, module in self.modules.items()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and tensor.numel() and name not in DERIVED
        }
        storages: set[int] = set()
        for (owner, leaf), tensor in tensors.items():
            is_derived = owner in reloaded and leaf != "bias"
            if is_derived or (owner, leaf) in published:
                storages.add(tensor.data_ptr())
        left = [path for path, tensor in tensors.items() if tensor.data_ptr() not in storages]
        if left:
            shown = ", ".join(".".join(path) for path in left[:4])
            if len(left) > 4:
                shown += f" and {len(left) - 4} more"
            raise UserError(
                f"the engine has {len(left)} parameters or buffers that QaRL would never write",
                where=f"{type(self.model).__name__}: {shown}",
                why="the trainer's model has no such tensors, so they would keep the random numbers of the start",
                fix="remove the setting in config.json that adds them (such as a bias), or report this model family",
            )

    @property
    def written(self) -> set[nn.Module]:
        """The modules that a complete publish has written, and packed if vLLM packs them."""
        return {target.module for target in self.by_owner.values()}

    def write_units(
        self, tensors: Iterable[NamedTensor], prepared: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Write all tensors of a publish, in layer order, one unit at a time. `prepared`: see `write`."""
        for _, unit in groupby(tensors, key=lambda item: unit_of(item[0])):
            self.write(dict(unit), prepared)

    @torch.no_grad()
    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        prepared: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Write the tensors of whole modules. After ReloadFailed the engine is broken. After any other exception the
        same write can be repeated.

        `prepared`: codes of these tensors that the trainer's kernel has converted already (`NAME.weight_tiles`). They
        are copied where the engine has the same layout."""
        parts: dict[str, Part] = {}
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            parts.setdefault(owner, {})[leaf] = tensor
        targets = {self.by_owner[owner].name: self.by_owner[owner] for owner in parts}
        reloaded: list[Target] = []
        for target in targets.values():
            whole = [parts[owner] for owner in target.parts]
            if target.stored is None:
                reloaded.append(target)
            else:
                target.write(whole, prepared or {})
        if reloaded:
            self._reload(reloaded, parts)

    def _reload(self, targets: list[Target], parts: Mapping[str, Part]) -> None:
        """Load `targets` with vLLM's layerwise reload. Stacks of experts do not pass through the model's loader, which
        takes experts one by one."""
        stacks = [target for target in targets if holds_experts(target.module)]
        others: dict[str, torch.Tensor] = {}
        for target in targets:
            if target in stacks:
                continue
            inner = self._inner.get(target.module, "")
            for owner in target.parts:
                for leaf, tensor in parts[owner].items():
                    others[f"{owner}{inner}.{leaf}"] = tensor
        modules = [target.module for target in targets]
        owners = [owner for target in targets for owner in target.parts]
        with _reloading(self.vllm_config, modules, owners):
            loader: Any = self.model
            for target in stacks:
                whole = [parts[owner] for owner in target.parts]
                share = target.cut(target.module, whole) if target.cut else None
                experts.reload(target.module, whole, share)
            if others:
                loader.load_weights(others.items())


def _module_of(
    owner: str, modules: Mapping[str, nn.Module], fused_into: Mapping[str, str]
) -> str | None:
    """Return the engine's module for the checkpoint module `owner`: the first that exists of the experts' module, the
    fused layer, the module of the same name, and its nearest parent. Return None if none exists."""
    if module := experts.module_of(owner, modules):
        return module
    parent, _, leaf = owner.rpartition(".")
    fused = f"{parent}.{fused_into[leaf]}" if leaf in fused_into else None
    if fused in modules:
        return fused
    while owner and owner not in modules:
        owner = owner.rpartition(".")[0]
    # A decoder layer or the whole model does not count as a parent, because it would not load the tensor itself.
    return (
        owner
        if owner and (modules[owner]._parameters or hasattr(modules[owner], "quant_method"))
        else None
    )


def _is_on_cpu(module: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters(recurse=False))


def _without_memory(expected: Manifest, owner: str) -> Part:
    """Return the published tensors of the checkpoint module `owner`, on the meta device."""
    named = ((name.rpartition("."), spec) for name, spec in expected.items())
    return {
        leaf: torch.empty(s.shape, dtype=s.dtype, device="meta")
        for (of, _, leaf), s in named
        if of == owner
    }


def _stored_on_cpu(target: Target, direct: bool) -> StoredLayer | None:
    """Return how the module of `target` is written on a CPU, or None if vLLM's layerwise reload does it."""
    module = target.module
    known = target.cut is not None
    if holds_experts(module):
        stored = experts.stored_on_cpu(module)
        return stored if direct and known else None
    kernel = kernel_of(module)
    by_kernel = find_layer(type(kernel).__mro__, cpu_layers.LAYERS)
    if by_kernel is not None and not by_kernel.survives_reload:
        if known or not hasattr(kernel, "dnnl_handler"):
            return by_kernel if hasattr(kernel, "dnnl_handler") else None
        raise UserError(
            f"QaRL cannot write W8A8 weights into {target.name}, which is split over the workers",
            where=f"rollout.tensor_model_parallel_size={module.tp_size}, {type(module).__name__}",
            why="QaRL does not know how it is split, and after vLLM's own reload it would return NaN on a CPU",
            fix="set rollout.tensor_model_parallel_size=1, or choose another quant.scheme",
        )
    if getattr(module, "use_w4a8", False):
        raise UserError(
            "vLLM would multiply W4A16 weights by int8 activations",
            where="environment variable VLLM_CPU_INT4_W4A8 of the rollout engine",
            why="it is on by default on CPUs with AMX, such as this one, but the trainer uses BF16 activations",
            fix="set VLLM_CPU_INT4_W4A8=0 in the process that starts the engine",
        )
    if not (direct and known):
        return None
    if (
        getattr(module, "scheme", None) is None
        and not hasattr(module, "quant_method")
        and not list(module.children())
    ):
        return cpu_layers.PLAIN
    methods = type(getattr(module, "quant_method", None)).__mro__  # QaRL's own subclass vLLM's
    return by_kernel or find_layer(methods, cpu_layers.LAYERS)


def cut_of(module: nn.Module, parts: int) -> Cut | None:
    """Return the function that cuts whole tensors for this worker, or None if QaRL does not know how.

    `parts`: number of checkpoint modules in `module`."""
    if holds_experts(module):
        return experts.cut_of_experts(module)
    if getattr(module, "tp_size", 1) == 1 or any(
        kind.__name__ == "ReplicatedLinear" for kind in type(module).__mro__
    ):
        return _whole
    return cut_of_split(module, parts)


def _whole(module: nn.Module, parts: list[Part]) -> list[Part]:
    return parts


@contextmanager
def _reloading(vllm_config: Any, modules: list[nn.Module], owners: list[str]) -> Iterator[None]:
    """In this context, load the weights of `modules` with their `weight_loader`, for vLLM's layerwise reload.

    vLLM processes them as at the engine's start, and copies the results into the old storage."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    with graph_addresses.as_vllm_loads(
        vllm_config, {f"module{i}": module for i, module in enumerate(modules)}
    ):
        for module in modules:
            initialize_layerwise_reload(module)
        try:
            yield
            for module in modules:
                finalize_layerwise_reload(module, vllm_config.model_config)
        except BaseException as error:
            names = ", ".join(owners[:4])
            raise ReloadFailed(
                f"vLLM could not reload {names} ...", why=f"{type(error).__name__}: {error}"
            ) from error


def refresh_tied_layers(model: nn.Module, fresh: Collection[nn.Module] = ()) -> None:
    """Pack the weights of tied layers again, except those of the modules `fresh`. Call this after a publish.

    On CPU, vLLM packs each weight once, at load. A publish has no tensor for a tied lm_head, so without this function
    lm_head would keep multiplying by the old weight (seen also after vLLM's own reload).
    """
    sharing: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.numel():
            sharing.setdefault(weight.data_ptr(), []).append(module)
    for modules in sharing.values():
        for module in modules if len(modules) > 1 else []:
            quant_method: Any = getattr(module, "quant_method", None)
            if quant_method is not None and module not in fresh:
                quant_method.process_weights_after_loading(module)
