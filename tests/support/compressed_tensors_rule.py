"""compressed-tensors' own quantization of one weight, which the quantizer is compared with."""

from __future__ import annotations

from typing import Any

from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

PRESETS: dict[str, tuple[str, type[BaseCompressor]]] = {
    "w4a16": ("W4A16", PackedQuantizationCompressor),
    "w4a8": ("W4A8", PackedQuantizationCompressor),
    "w8a8": ("W8A8", IntQuantizationCompressor),
    "fp8": ("FP8_DYNAMIC", FloatQuantizationCompressor),
}


def compressed_tensors_compress(
    weight: Tensor, name: str, group_size: int
) -> tuple[dict[str, Tensor], Any]:
    """compressed-tensors' own preset, observer arithmetic and compressor; its scales have the weight's dtype."""
    scheme: QuantizationScheme = preset_name_to_scheme(PRESETS[name][0], ["Linear"])
    assert scheme.weights is not None
    if scheme.weights.group_size is not None:
        scheme.weights.group_size = group_size
        groups = weight.unflatten(-1, (-1, group_size))
        scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    else:
        scale, zero_point = calculate_qparams(
            weight.amin(-1, True), weight.amax(-1, True), scheme.weights
        )
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    return PRESETS[name][1].compress(state, scheme), scheme
