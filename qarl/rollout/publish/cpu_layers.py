"""vLLM's dense layers on a CPU: how published tensors are written into their storage. Views of what layers store.

The views are for a trainer in the same process whose weights are frozen: trainer and engine then multiply by one copy
(`WeightReceiver.storage`). They exist for what vLLM leaves readable:

    W4A16                       codes in tiles, as the trainer's kernel reads them, and scales; experts, too
    FP8                         codes and scales, as published
    embeddings, lm_head, norms  the weight, as published

oneDNN hides W8A8 weights, and vLLM packs BF16 linears and drops the original. A trainer has its own copy of these.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from qarl.kernels.cpu.vllm_linears import TILE_ROWS, TILES, VllmCpuWNA16Linear
from qarl.rollout.publish.stored_layer import StoredLayer, kernel_of
from qarl.rollout.publish.tensor_parallel import Part


def write_plain(module: nn.Module, parts: list[Part]) -> None:
    """Write parameters that vLLM uses unchanged, such as those of norms."""
    (part,) = parts
    for name, tensor in part.items():
        module.get_parameter(name).data.copy_(tensor)


def write_unquantized(layer: Any, parts: list[Part]) -> None:
    """Write BF16 weights, and let vLLM pack them again."""
    weight = _fused(parts, "weight")
    if layer.weight.numel():
        layer.weight.data[: len(weight)].copy_(weight)
    else:
        layer.weight = nn.Parameter(
            weight.clone() if len(parts) == 1 else weight, requires_grad=False
        )
    layer.quant_method.process_weights_after_loading(layer)
    _write_bias(layer, parts)


def write_wna16(layer: Any, parts: list[Part]) -> None:
    """Write int4 weights in tiles of 16 output channels, and the scales transposed.

    `parts` may have the tiles that the trainer's kernel has made of their codes."""
    if all(TILES.codes in part for part in parts):
        _copy_tiles(layer, parts)
    else:
        prepared = VllmCpuWNA16Linear.prepare(
            {name: _fused(parts, name) for name in ("weight_packed", "weight_scale")}
        )
        layer.weight_packed.data.copy_(prepared.weight)
        layer.weight_scale.data.copy_(prepared.scale)
    _write_bias(layer, parts)


def _copy_tiles(layer: Any, parts: list[Part]) -> None:
    rows = [len(part["weight_scale"]) for part in parts]
    for stored, part in zip(_read_wna16(layer, rows), parts, strict=True):
        for name, view in stored.items():
            tensor = part[name]
            assert view.shape == tensor.shape and view.dtype == tensor.dtype
            view.copy_(tensor)


def write_int8(layer: Any, parts: list[Part]) -> None:
    """Write int8 weights into a new oneDNN handler. It has the only copy of the weights, and points to the scales."""
    from vllm import _custom_ops as ops

    kernel = layer.scheme.kernel
    weight = _fused(parts, "weight")
    layer.weight_scale.data.copy_(_fused(parts, "weight_scale"))
    if (
        getattr(layer, "azp_adj", None) is not None
    ):  # used only for asymmetric activations, but kept correct
        ones = weight.new_ones(weight.shape[1], 8)
        sums = torch._int_mm(weight, ones)[:, 0]  # of integers, in half of the time of a sum
        layer.azp_adj.data.copy_(sums.float() * layer.weight_scale.squeeze(1))
    dtype = getattr(layer, "params_dtype", torch.bfloat16)
    kernel.dnnl_handler = ops.create_onednn_scaled_mm(
        weight.t(),
        layer.weight_scale,
        dtype,
        dynamic_quant=True,
        use_azp=False,
        primitive_cache_size=32,
    )
    _write_bias(layer, parts)


def write_fp8(layer: Any, parts: list[Part]) -> None:
    """Write e4m3 weights. The storage is [N, K]; vLLM's parameter is its [K, N] view."""
    layer.weight.data.t().copy_(_fused(parts, "weight"))
    layer.weight_scale.data.copy_(_fused(parts, "weight_scale"))
    _write_bias(layer, parts)


def write_own(layer: Any, parts: list[Part]) -> None:
    """Write the weights of a layer that runs QaRL's own kernel (`qarl.rollout.vllm_plugin.own_linears`)."""
    kernel = kernel_of(layer)
    kernel.write(layer, {name: _fused(parts, name) for name in kernel.names})
    _write_bias(layer, parts)


def _write_bias(layer: Any, parts: list[Part]) -> None:
    if "bias" in parts[0]:
        layer.bias.data.copy_(_fused(parts, "bias"))


def _fused(parts: list[Part], name: str) -> torch.Tensor:
    """Concatenate a fused layer's tensors along the output dimension, which is the first in the checkpoint format."""
    return parts[0][name] if len(parts) == 1 else torch.cat([part[name] for part in parts])


def _slices(rows: list[int]) -> list[slice]:
    return [slice(*ends) for ends in pairwise(accumulate(rows, initial=0))]


def _read_wna16(layer: Any, rows: list[int]) -> list[Part]:
    tiles = layer.weight_packed.data
    scales = layer.weight_scale.data
    return [
        {
            TILES.codes: tiles[part.start // TILE_ROWS : part.stop // TILE_ROWS],
            "weight_scale": scales[:, part].t(),
        }
        for part in _slices(rows)
    ]


def _read_fp8(layer: Any, rows: list[int]) -> list[Part]:
    codes = layer.weight.data.t()
    scales = layer.weight_scale.data
    return [{"weight": codes[part], "weight_scale": scales[part]} for part in _slices(rows)]


def _read_weight(layer: Any, rows: list[int]) -> list[Part]:
    weight = layer.weight.data
    return [{"weight": weight[part]} if weight.numel() else {} for part in _slices(rows)]


PLAIN = StoredLayer(write_plain, read=_read_weight)
"""Modules without a kernel, such as norms."""
LAYERS = (
    StoredLayer(write_own, engine_classes=("OwnLinearKernel",)),
    StoredLayer(
        write_wna16,
        engine_classes=("CPUWNA16LinearKernel",),
        read=_read_wna16,
        takes_tiles=True,
    ),
    StoredLayer(
        write_int8,
        engine_classes=("CPUInt8ScaledMMLinearKernel", "QaRLAdaptedInt8LinearKernel"),
        survives_reload=False,
    ),
    StoredLayer(
        write_fp8, engine_classes=("ChannelWiseTorchFP8ScaledMMLinearKernel",), read=_read_fp8
    ),
    StoredLayer(
        write_unquantized,
        engine_classes=("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"),
        read=_read_weight,
    ),
)
"""vLLM's dense layers on a CPU."""
