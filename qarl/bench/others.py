"""Other projects' kernels: gemlite (on our grid) and torchao (on its own) where they are installed, and the quantizers
of compressed-tensors, whose grid is ours.

Each builder returns a call y = f(x) for one BF16 weight, or raises; the benchmark then says "not measured" and why.
API as documented: gemlite's README (github.com/dropbox/gemlite), docs.pytorch.org/ao/stable/api_reference. torchao
chooses its own scales, so its result is compared with the BF16 product, within the error of such quantization.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from qarl.kernels.int4 import unpack_int4
from qarl.quant.scheme import Scheme

Linear = Callable[[torch.Tensor], torch.Tensor]


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def gemlite_w4a16(tensors: Mapping[str, torch.Tensor]) -> Linear:
    """gemlite on the same int4 codes and scales; it reads unsigned codes and a zero point of 8."""
    from gemlite.core import DType, GemLiteLinear

    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    codes = unpack_int4(packed).add_(8).to(torch.uint8)
    group_size = codes.shape[1] // scale.shape[1]
    linear = GemLiteLinear(
        4,
        group_size=group_size,
        in_features=codes.shape[1],
        out_features=codes.shape[0],
        input_dtype=DType.BF16,
        output_dtype=DType.BF16,
    )
    zeros = torch.full_like(scale, 8.0)
    linear.pack(codes, scale, zeros, None)
    return lambda x: linear(x)


def torchao_linear(scheme: str, weight: torch.Tensor, group_size: int) -> Linear:
    """torchao's `quantize_` of an nn.Linear with its config for `scheme`."""
    from torchao import quantization

    configs: dict[str, Callable[[], Any]] = {
        "w4a16": lambda: quantization.Int4WeightOnlyConfig(group_size=group_size),
        "w8a8": lambda: quantization.Int8DynamicActivationInt8WeightConfig(),
        "fp8": lambda: quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow()),
    }
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    module = nn.Sequential(linear)
    quantization.quantize_(module, configs[scheme]())
    return lambda x: module(x)


def compressed_tensors_quantizer(weight: torch.Tensor, scheme: Scheme) -> Callable[[], dict[str, torch.Tensor]]:
    """compressed-tensors' own steps in eager PyTorch: scales, then its compressor; scales in the weight's dtype."""
    from compressed_tensors import compressors
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    if scheme.weights is None:
        raise ValueError(f"{scheme.name} has no quantized weights")
    args, group_size = scheme.weights.to_compressed_tensors(), scheme.group_size
    settings = QuantizationScheme(targets=["Linear"], weights=args)
    compressor: Any = {
        "pack-quantized": compressors.PackedQuantizationCompressor,
        "int-quantized": compressors.IntQuantizationCompressor,
        "float-quantized": compressors.FloatQuantizationCompressor,
    }[scheme.format or ""]

    def compress() -> dict[str, torch.Tensor]:
        groups = weight.unflatten(-1, (-1, group_size)) if group_size else weight[:, None]
        scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
        made: dict[str, torch.Tensor] = compressor.compress(state, settings)
        return made

    return compress
