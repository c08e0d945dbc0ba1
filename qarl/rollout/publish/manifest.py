"""The manifest of a publish: name, dtype and shape of every tensor that the engine expects.

It is built from the engine's own model config. Comparing it with the trainer's tensors finds a layer that is missing on
a side. vLLM itself accepts a missing scale and then returns NaN, and after a wrong shape even the next correct reload
fails. So everything is compared before the engine is touched.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from qarl.errors import UserError
from qarl.kernels.base import is_gpu
from qarl.quant.convert import select_linears, tied_names
from qarl.quant.experts import is_of_expert, is_stack, matrices
from qarl.quant.meta_model import meta_model
from qarl.quant.quantize import has_nonfinite
from qarl.quant.wire_specs import wire_specs
from qarl.rollout.publish.checksum import nonfinite_by_kernel
from qarl.rollout.publish.experts import quantized_experts
from qarl.schemes import UNQUANTIZED, Scheme, from_quantization_config

NamedTensor = tuple[str, torch.Tensor]
WRAPPED = ".base_layer"
"""What vLLM adds to the name of a linear when it wraps the linear with an adapter."""


@dataclass(frozen=True)
class TensorSpec:
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tensor.dtype, tuple(tensor.shape))

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """Return the spec that `text` describes. `text` is the result of `str(spec)`."""
        dtype, _, shape = text.partition(" ")
        return cls(getattr(torch, dtype), tuple(json.loads(shape)))


Manifest = dict[str, TensorSpec]


@dataclass(frozen=True)
class PublishReport:
    """Sizes and times of a publish.

    `bytes`: size of all tensors. `quantized_bytes`: that of quantized layers. `quantized_bf16_bytes`: the size of the
    same layers in BF16. `seconds`: duration of each phase."""

    version: int
    tensors: int
    bytes: int
    quantized_bytes: int
    quantized_bf16_bytes: int
    seconds: dict[str, float]

    @classmethod
    def of(
        cls,
        tensors: Sequence[NamedTensor],
        expected: Manifest,
        version: int,
        seconds: dict[str, float],
    ) -> PublishReport:
        """Return the report of a publish of `tensors`, whose quantized layers are those of `expected`."""
        layers = quantized_layers(expected)
        quantized_bytes = 0
        elements = 0
        for name, tensor in tensors:
            layer, _, leaf = name.rpartition(".")
            if layer not in layers or leaf == "bias":
                continue
            quantized_bytes += tensor.nbytes
            if leaf in ("weight", "weight_packed"):
                elements += tensor.numel() * (8 if leaf == "weight_packed" else 1)
        nbytes = sum(tensor.nbytes for _, tensor in tensors)
        return cls(version, len(tensors), nbytes, quantized_bytes, 2 * elements, seconds)

    def after(self, base: PublishReport) -> PublishReport:
        """Return the report of both publishes: that of an adapter, and before it that of its `base`."""
        seconds = dict(base.seconds)
        for phase, value in self.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + value
        return replace(base, bytes=base.bytes + self.bytes, seconds=seconds)

    @property
    def quantized_ratio(self) -> float:
        """Bytes of the quantized layers as a share of their BF16 bytes (1 if nothing is quantized)."""
        return (
            self.quantized_bytes / self.quantized_bf16_bytes if self.quantized_bf16_bytes else 1.0
        )

    def metrics(self, quantizing: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics `publish/*`: bytes, the ratio of bytes to BF16 in the quantized layers, and seconds by
        phase.

        `quantizing`: seconds of the quantizer by phase, summed over all optimizer steps of the training step."""
        sizes = {
            "publish/mbytes": self.bytes / 1e6,
            "publish/quantized_ratio": self.quantized_ratio,
        }
        seconds = {
            f"publish/{phase}_s": value for phase, value in {**quantizing, **self.seconds}.items()
        }
        return sizes | seconds


def expected_manifest(
    hf_config: Any,
    scheme: Scheme,
    ignore: Sequence[str],
    *,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Manifest:
    """Return name, dtype and shape of each tensor of a publish, for a model with this Hugging Face config in which all
    linear layers except those in `ignore` are quantized with `scheme`. `dtype`: that of all other tensors."""
    config = copy.deepcopy(hf_config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = meta_model(config, trust_remote_code=trust_remote_code, dtype=dtype)
    linears = select_linears(model, scheme, ignore)[0] if scheme.quantized else {}
    tied = tied_names(model)
    manifest: Manifest = {}
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if name in tied:
            continue
        if is_stack(name, tensor.shape):
            matrix = next(matrices(name, tuple(tensor.shape))).name
            plain = {"weight": (tensor.dtype, tuple(tensor.shape[1:]))}
            wire = wire_specs(scheme, *tensor.shape[1:]) if matrix in linears else plain
            specs = {
                leaf: TensorSpec(dtype, (len(tensor), *shape))
                for leaf, (dtype, shape) in wire.items()
            }
            manifest |= {
                f"{name}.{leaf}": spec for leaf, spec in specs.items() if leaf != "weight_shape"
            }
        elif owner in linears and leaf == "weight":
            for suffix, (dtype, shape) in wire_specs(scheme, *tensor.shape).items():
                manifest[f"{owner}.{suffix}"] = TensorSpec(dtype, shape)
        else:
            manifest[name] = TensorSpec(tensor.dtype, tuple(tensor.shape))
    return manifest


def of_matrices(manifest: Manifest) -> Manifest:
    """Return the manifest of the same tensors with each expert's matrices by themselves, as in a checkpoint."""
    matrix_specs: Manifest = {}
    for name, spec in manifest.items():
        stack, _, leaf = name.rpartition(".")
        if not is_stack(stack, spec.shape):
            matrix_specs[name] = spec
            continue
        for matrix in matrices(stack, (spec.shape[0], spec.shape[1], spec.shape[2])):
            rows = matrix.rows.stop - matrix.rows.start
            matrix_specs[f"{matrix.name}.{leaf}"] = TensorSpec(spec.dtype, (rows, spec.shape[2]))
            if leaf == "weight_packed":
                matrix_specs[f"{matrix.name}.weight_shape"] = TensorSpec(torch.int64, (2,))
    return matrix_specs


def engines_manifest(hf_config: Any, vllm_model: Any) -> Manifest:
    """Return the manifest that a vLLM engine expects, read from its own quantization config.

    Raises:
        UserError: trainer and engine would quantize different layers.
    """
    quantization: Any = getattr(hf_config, "quantization_config", None)
    scheme = UNQUANTIZED
    ignore = []
    if quantization is not None:
        scheme = from_quantization_config(quantization)
        ignore = list(quantization.get("ignore") or [])
    expected = expected_manifest(hf_config, scheme, ignore)
    check_same_layers(vllm_model, expected)
    return expected


def quantized_layers(manifest: Manifest) -> set[str]:
    """Return the names of the quantized layers. In every scheme these are the layers that have scales."""
    return {
        name.removesuffix(".weight_scale") for name in manifest if name.endswith(".weight_scale")
    }


def without_wrappers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the engine's `model` under the names that they have without adapters.

    vLLM wraps each linear that can have an adapter. The wrapper has the linear's name, and the linear is its
    `base_layer`."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            continue
        yield name.removesuffix(WRAPPED).replace(f"{WRAPPED}.", "."), module


def check_same_layers(vllm_model: Any, expected: Manifest) -> None:
    """Raise UserError unless vLLM has quantized the same layers as the manifest. The two sides may read the ignore list
    differently. A layer fused by vLLM counts as its parts. The message names layers that only one side quantizes."""
    fused: dict[str, list[str]] = getattr(vllm_model, "packed_modules_mapping", {})
    engine = quantized_experts(vllm_model)
    for name, module in without_wrappers(vllm_model):
        if getattr(module, "scheme", None) is None or not hasattr(module, "quant_method"):
            continue
        parent, _, leaf = name.rpartition(".")
        engine.update(f"{parent}.{part}" for part in fused.get(leaf, [leaf]))
    ours = quantized_layers(expected)
    if engine != ours:
        only_ours = sorted(ours - engine)[:4]
        only_engine = sorted(engine - ours)[:4]
        raise UserError(
            "trainer and rollout engine would quantize different layers",
            where=f"only the trainer: {only_ours}; only the engine: {only_engine}",
            why="they read an entry of quant.ignore differently, or it covers only a part of a fused layer",
            fix='in quant.ignore, name all parts of a fused layer (q/k/v, gate/up), and "re:.*mlp[.]gate$" for routers',
        )


def check_complete(tensors: Iterable[tuple[str, torch.Tensor]], expected: Manifest) -> None:
    """Raise UserError if a tensor is missing, unexpected or sent twice, has the wrong dtype or shape, or holds NaN or
    Inf. The message names the first eight such tensors. The experts may be in stacks or, as in a checkpoint, one by
    one."""
    named = list(tensors)
    if any(is_of_expert(name) for name, _ in named):
        expected = of_matrices(expected)
    bad = set(not_finite((name, tensor) for name, tensor in named if name in expected))
    check_specs([(name, TensorSpec.of(tensor)) for name, tensor in named], expected, not_finite=bad)


def check_specs(
    specs: Iterable[tuple[str, TensorSpec]], expected: Manifest, *, not_finite: Collection[str] = ()
) -> None:
    """Make the checks of `check_complete` without the tensors, from names, dtypes and shapes. `not_finite`: names of
    tensors that hold NaN or Inf."""
    problems: list[str] = []
    seen: set[str] = set()
    for name, sent in specs:
        spec = expected.get(name)
        if name in seen:
            problems.append(f"{name}: sent twice")
        elif spec is None:
            problems.append(f"{name}: not a tensor of this model")
        elif sent != spec:
            problems.append(f"{name}: is {sent}, the engine expects {spec}")
        elif name in not_finite:
            problems.append(f"{name}: holds NaN or Inf")
        seen.add(name)
    problems += [f"{name}: missing" for name in expected if name not in seen]
    if problems:
        shown = "; ".join(problems[:8]) + (
            f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        )
        raise UserError(
            f"the weights cannot be published: {len(problems)} tensors do not fit the engine",
            where=shown,
            why="vLLM would accept some of these tensors without an error, and then return NaN or wrong outputs",
            fix="publish the tensors of packed_state_dict(model), with the engine's scheme, group_size and ignore",
        )


_DECODER_LAYER = re.compile(r"(.*?\.layers\.\d+)\.")


def unit_of(name: str) -> str:
    """Return the decoder layer of the tensor `name`, or its module if it is outside the decoder layers."""
    match = _DECODER_LAYER.match(name)
    return match[1] if match else name.rpartition(".")[0]


def not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the tensors that contain NaN or Inf. This waits for each device only once."""
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            by_device.setdefault(tensor.device, []).append((name, tensor.detach()))
    bad: list[str] = []
    for members in by_device.values():
        flags = _flags([tensor for _, tensor in members]).tolist()
        bad += [name for (name, _), flag in zip(members, flags, strict=True) if flag]
    return bad


def _flags(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return, as bool [tensors], which of these float tensors of one device contain NaN or Inf."""
    flags = nonfinite_by_kernel(tensors) if is_gpu(tensors[0].device) else None
    return torch.stack([has_nonfinite(t) for t in tensors]) if flags is None else flags
