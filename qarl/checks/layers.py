"""Refuses layers that the engine could not run or split. The checks need only the model's config, no weights.

vLLM refuses most of these layers too, but only after the trainer has loaded its weights, with a traceback, and without
naming our config keys. vLLM splits a model over the workers of an engine as follows:

- q, k, v, gate and up are split along N.
- o and down are split along K. Weights along K that share a scale must be on one worker.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from qarl.config import Config
from qarl.config.ignored_layers import is_ignored, resolve_ignored
from qarl.errors import UserError
from qarl.quant import convert
from qarl.quant import meta_model as meta
from qarl.quant.convert import FUSED_LAYERS
from qarl.schemes import Scheme, get_scheme

KEY = "rollout.tensor_model_parallel_size"
ROW_PARALLEL = ("o_proj", "down_proj", "dense", "dense_4h_to_h")
"""Linears that are split along K; all other linears of a block are split along N. The last two are Falcon's."""

Shapes = dict[str, tuple[int, int]]
"""Name of each linear -> [N, K], its numbers of output and input features. The linears of experts are included."""


def of_expert(name: str) -> bool:
    return ".experts." in name


def select_shapes(shapes: Shapes, scheme: Scheme, ignore: Sequence[str]) -> Shapes:
    """Return the layers that are quantized. Raise UserError if there are none."""
    selected = {name: shape for name, shape in shapes.items() if not is_ignored(name, ignore)}
    if not selected:
        raise UserError(
            f"quant.scheme={scheme.name}, but no layer is left to quantize",
            where="quant.ignore",
            why=f"quant.ignore matches all {len(shapes)} linears of the model",
            fix="list fewer layers in quant.ignore, or set quant.scheme=bf16",
        )
    return selected


def meta_model(hf_config: Any, *, trust_remote_code: bool = False) -> nn.Module:
    """Build the model that `hf_config` describes, in BF16 on the meta device. Raise UserError if that fails."""
    try:
        return meta.meta_model(hf_config, trust_remote_code=trust_remote_code)
    except (
        Exception
    ) as error:  # the exception type depends on which config key the model class cannot use
        raise UserError(
            f"no causal language model can be built from a config of type {hf_config.model_type!r}",
            where="model.path",
            why=" ".join(f"{type(error).__name__}: {error}".split())[:400],
            fix="give a causal language model with the config.json that was published with it",
        ) from error


def check_fused_layers(names: Iterable[str], ignore: Sequence[str]) -> None:
    """Raise UserError if `ignore` matches only some linears of a fused layer, or only some experts of a layer."""
    names = list(names)
    for entry in ignore:
        if entry in names or entry.startswith("re:"):
            continue
        leaf = entry.rpartition(".")[2]
        parts = FUSED_LAYERS.get(leaf) or next(
            (parts for parts in FUSED_LAYERS.values() if leaf in parts), (leaf,)
        )
        alike = [name for name in names if name.rpartition(".")[2] in parts]
        if alike and (leaf in FUSED_LAYERS or any(name.endswith(f".{entry}") for name in alike)):
            raise UserError(
                f"quant.ignore entry {entry} names no linear",
                where="quant.ignore",
                why=f"an entry is a complete name of the checkpoint, such as {alike[0]}, or a pattern",
                fix=f'write "re:.*[.]({"|".join(parts)})$" for all layers, with those that the engine treats alike',
            )
    split: dict[str, list[str]] = {"ignored": [], "quantized": []}
    for members in fused_groups(names).values():
        ignored = [name for name in members if is_ignored(name, ignore)]
        if ignored and len(ignored) < len(members):
            split["ignored"] += ignored
            split["quantized"] += [name for name in members if name not in ignored]
    if split["ignored"]:
        raise UserError(
            "quant.ignore splits layers that the engine fuses into one",
            where=f"ignored: {name_layers(split['ignored'])}; quantized: {name_layers(split['quantized'])}",
            why="vLLM fuses q_proj, k_proj and v_proj into one layer, and gate_proj and up_proj into another. It "
            "quantizes a fused layer whole or not at all",
            fix="name either all layers of a fused group in quant.ignore or none of them",
        )
    resolved = resolve_ignored(names, ignore)
    convert.check_whole_experts(resolved.quantized, resolved.ignored)


def routers(names: Iterable[str]) -> list[str]:
    """Return the names of the routers beside the experts of `names`. In transformers they are no linears."""
    return list(
        dict.fromkeys(f"{name.partition('.experts.')[0]}.gate" for name in names if of_expert(name))
    )


def check_routers(names: Iterable[str], ignore: Sequence[str]) -> None:
    """Raise UserError if `ignore` does not match all routers of experts, because vLLM would quantize the others."""
    if quantized := [name for name in routers(names) if not is_ignored(name, ignore)]:
        raise UserError(
            f"vLLM would quantize {len(quantized)} routers, which the trainer keeps in BF16",
            where=f"quant.ignore: {name_layers(quantized)}",
            why="a router is a linear layer in vLLM, but not in transformers",
            fix='add "re:.*mlp[.]gate$" to quant.ignore',
        )


def fused_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Return a dict: name of each layer in the engine -> those of `names` that the engine fuses into this layer."""
    fused_name = {part: fused for fused, parts in FUSED_LAYERS.items() for part in parts}
    groups: dict[str, list[str]] = {}
    for name in names:
        owner, dot, leaf = name.rpartition(".")
        groups.setdefault(owner + dot + fused_name.get(leaf, leaf), []).append(name)
    return groups


def check_group_size(quantized: Shapes, scheme: Scheme) -> None:
    bad = [
        name for name, shape in quantized.items() if scheme.check_shape(name, *shape) is not None
    ]
    if bad:
        sizes = sorted({quantized[name][1] for name in bad})
        raise UserError(
            f"quant.group_size={scheme.group_size} does not divide {len(bad)} of {len(quantized)} layers",
            where=name_layers(bad),
            why=f"weights are grouped along K, and these layers have {', '.join(map(str, sizes))} inputs",
            fix="choose a quant.group_size that divides every input size, or add these layers to quant.ignore",
        )


def check_engine_shapes(scheme: Scheme, shapes: Shapes) -> None:
    """Raise UserError if vLLM's kernel for CPUs does not support the size that a layer has after fusing."""
    bad: list[str] = []
    for members in fused_groups(shapes).values():
        n = sum(shapes[name][0] for name in members)
        k = shapes[members[0]][1]
        bad += members if n % scheme.cpu_multiple or k % scheme.cpu_multiple else []
    if bad:
        sizes = ", ".join(f"[{n}, {k}]" for n, k in dict.fromkeys(shapes[name] for name in bad))
        raise UserError(
            f"vLLM's {scheme.name.upper()} kernel for CPUs does not support {len(bad)} of {len(shapes)} layers",
            where=name_layers(bad),
            why=f"input and output sizes must be multiples of {scheme.cpu_multiple}. In a fused layer (q, k and v, or "
            f"gate and up), this applies to the sum of the output sizes. These weights are {sizes}",
            fix="add these layers to quant.ignore, or use another model or quant.scheme=bf16",
        )


def name_layers(names: Iterable[str]) -> str:
    """Return `names` as text. Names that differ only in the layer number are joined: `model.layers.0-27.mlp.down_proj`.
    `*` replaces the number of an expert."""
    numbers: dict[str, list[int]] = {}
    for name in dict.fromkeys(
        re.sub(r"[.]experts[.][0-9]+[.]", ".experts.*.", name) for name in names
    ):
        match = re.search(r"(?<=[.])\d+(?=[.])", name)
        pattern = f"{name[: match.start()]}{{}}{name[match.end() :]}" if match else name
        numbers.setdefault(pattern, []).extend([int(match[0])] if match else [])
    return ", ".join(pattern.format(_ranges(indices)) for pattern, indices in numbers.items())


def _ranges(numbers: list[int]) -> str:
    """Write numbers as ranges: [0, 1, 2, 5] becomes `0-2,5`."""
    runs = itertools.groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(items) for _, items in runs)]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def split_errors(config: Config, hf_config: Any, quantized: Shapes) -> Iterator[UserError]:
    """Yield an error if ranks, heads or groups of weights do not split over `rollout.tensor_model_parallel_size`
    workers. vLLM itself reports other sizes that do not split. `quantized`: the linears that are quantized."""
    workers = config.rollout.tensor_model_parallel_size
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if ranks % workers:
        what = f"{KEY}={workers}: {ranks} ranks cannot be divided into engines of {workers} workers"
        where = "trainer.nnodes * trainer.n_gpus_per_node"
        why = "in verl, each worker of an engine needs one rank"
        yield UserError(what, where=where, why=why, fix=f"choose a divisor of {ranks}")
    if (heads := hf_config.num_attention_heads) % workers:
        what = f"{KEY}={workers}: {heads} attention heads do not split evenly"
        why = "each worker needs whole heads"
        yield UserError(
            what, where="num_attention_heads", why=why, fix=f"choose a divisor of {heads}"
        )
    group = get_scheme(config.quant.scheme, config.quant.group_size).group_size or 1
    inputs = {
        name: k // workers for name, (_, k) in quantized.items() if name.endswith(ROW_PARALLEL)
    }
    if cut := [name for name, k in inputs.items() if k % group]:
        sizes = ", ".join(map(str, sorted({inputs[name] for name in cut})))
        yield UserError(
            f"{KEY}={workers}: {len(cut)} layers cannot be split along their inputs",
            where=name_layers(cut),
            why=f"{sizes} inputs per worker are not a multiple of group_size={group}, so two would share a group",
            fix="choose fewer workers, or a smaller quant.group_size",
        )
