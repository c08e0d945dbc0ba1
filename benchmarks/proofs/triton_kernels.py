"""The types and configurations with which the wrappers of qarl/kernels/triton launch their kernels.

`triton_aot.py` compiles them for GPUs that need not be here, so that a configuration that spills registers or
does not fit is found before a GPU is at hand. tests/kernels/test_triton.py finds a missing kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl

from qarl.kernels.triton.checksum import checksum_kernel, checksum_rows_kernel
from qarl.kernels.triton.common import Tile, tables
from qarl.kernels.triton.experts import (
    clear_unused_kernel,
    combine_kernel,
    grouped_scaled_mm_kernel,
    grouped_w4a16_backward_kernel,
    grouped_w4a16_kernel,
    swiglu_backward_kernel,
)
from qarl.kernels.triton.quantize import (
    WEIGHT_TILE,
    codes_from_marlin_kernel,
    dequantize_int4_kernel,
    dequantize_rows_kernel,
    quantize_int4_kernel,
    quantize_rows_kernel,
    quantize_tokens_kernel,
)
from qarl.kernels.triton.scaled_mm import scaled_mm_kernel
from qarl.kernels.triton.w4a16 import w4a16_backward_kernel, w4a16_kernel

TARGETS = {"ampere": 80, "hopper": 90, "blackwell": 100, "blackwell_geforce": 120}


@dataclass(frozen=True)
class AotConfig:
    """One configuration a wrapper launches."""

    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    targets: tuple[int, ...] = (80, 90, 100, 120)


@dataclass(frozen=True)
class AotKernel:
    """One kernel with one set of argument types.

    `signature`: argument -> "*bf16", "*i32", "i32", "fp32", ...; those in a configuration's `constexprs` are left out.
    Pointers are taken to be 16-byte aligned, and so are the integers in `divisible`; an integer of 1 is a constexpr,
    as Triton makes it one at a launch.
    """

    kernel: Any
    signature: Mapping[str, str]
    configs: tuple[AotConfig, ...]
    divisible: tuple[str, ...] = field(default=())


def shipped(*operations: str, per_sm: bool = True) -> list[tuple[Tile, tuple[int, ...]]]:
    """Every tile in the tables of `operations`, with the targets it serves; `per_sm` tells tiles apart, or is 0."""
    found: dict[Tile, tuple[int, ...]] = {}
    for kind, target in TARGETS.items():
        tiles = {rule.tile for name in operations for rule in tables()[kind][name]}
        for tile in tiles if per_sm else {tile._replace(per_sm=0) for tile in tiles}:
            found[tile] = (*found.get(tile, ()), target)
    return sorted(found.items())


_W4A16_TYPES = {"packed_ptr": "*i16", "scale_ptr": "*bf16", "workspace_ptr": "*fp32", "counter_ptr": "*i32",
          "M": "i32", "N": "i32", "K": "i32", "parts": "i32"}  # fmt: skip


def _w4a16(kernel: Any, operation: str, types: dict[str, str], stride: str, even: str) -> AotKernel:
    """Every tile of the table with groups of 128, and with groups of 32 and a last block that is not whole."""
    configs = [
        AotConfig(
            {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "GROUP": group, even: group == 128, "PTX": True},
            targets=targets,
            **tile.launch,
        )
        for tile, targets in shipped(operation, f"{operation}_invariant", per_sm=False)
        for group in (128, 32)
    ]
    return AotKernel(kernel, types | _W4A16_TYPES, tuple(configs), divisible=("K", stride))


W4A16 = [
    _w4a16(w4a16_kernel, "w4a16", {"x_ptr": "*bf16", "bias_ptr": "*bf16", "y_ptr": "*bf16", "stride_xm": "i32"},
         "stride_xm", "EVEN_K"),
    _w4a16(w4a16_backward_kernel, "w4a16_backward", {"grad_ptr": "*bf16", "dx_ptr": "*bf16", "stride_gm": "i32"},
         "stride_gm", "EVEN_N"),
]  # fmt: skip


def _scaled_mm() -> list[AotKernel]:
    """Every tile with the tensor memory accelerator, as each program count needs it, and once with plain loads."""
    entries = []
    once: dict[str, Any] = {"PERSISTENT": False, "workspace_ptr": None, "counter_ptr": None, "parts": 1}
    for operation, kind in (("w8a8", "i8"), ("fp8", "fp8e4nv"), ("fp8_fast", "fp8e4nv")):
        types = {"x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16",
                 "workspace_ptr": "*i32" if kind == "i8" else "*fp32", "counter_ptr": "*i32",
                 "M": "i32", "N": "i32", "K": "i32", "stride_xm": "i32", "parts": "i32"}  # fmt: skip
        for tile, targets in shipped(operation, f"{operation}_invariant"):
            constants = {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "FAST": operation == "fp8_fast",
                         "ACC": tl.int32 if kind == "i8" else tl.float32}  # fmt: skip
            split_or_persistent = [{"PERSISTENT": False}, {**once, "PERSISTENT": True}] if tile.per_sm else [once]
            with_tma = tuple(target for target in targets if target >= 90)
            for tma, on, variants in (
                (True, with_tma, split_or_persistent), (False, targets, split_or_persistent[:1])
            ):  # fmt: skip
                descriptors = {
                    name: f"tensordesc<{kind}[{rows}, {tile.BK}]>"
                    for name, rows in (("x_ptr", tile.BM), ("w_ptr", tile.BN))
                }
                pointers = descriptors if tma else {"x_ptr": f"*{kind}", "w_ptr": f"*{kind}"}
                configs = tuple(
                    AotConfig({**constants, "TMA": tma, "EVEN_K": tma, **variant}, targets=on, **tile.launch)
                    for variant in variants
                )
                if on:
                    entries.append(AotKernel(scaled_mm_kernel, types | pointers, configs, ("K", "stride_xm")))
    return entries


def _grouped() -> list[AotKernel]:
    """Every tile in the tables, with 128 experts; group sizes 128, and 32 with an incomplete last block."""
    integers = dict.fromkeys(("experts", "tiles_m", "M", "N", "K", "stride_xm", "stride_gm"), "i32")
    pointers = {"packed_ptr": "*i16", "scale_ptr": "*bf16", "ends_ptr": "*i32", "y_ptr": "*bf16", "dx_ptr": "*bf16",
                "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32"}  # fmt: skip
    entries = []
    for kernel, operation, even, stride in (
        (grouped_w4a16_kernel, "grouped_w4a16", "EVEN_K", "stride_xm"),
        (grouped_w4a16_backward_kernel, "grouped_w4a16_backward", "EVEN_N", "stride_gm"),
    ):
        configs = tuple(
            AotConfig({"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "GROUP": group, even: group == 128, "PTX": True,
                       "SIZE": 128}, targets=targets, **tile.launch)
            for tile, targets in shipped(operation)
            for group in (128, 32)
        )  # fmt: skip
        types = integers | pointers | {"x_ptr": "*bf16", "grad_ptr": "*bf16"}
        entries.append(_entry(kernel, types, configs, ("N", "K", stride)))
    for operation, kind in (("w8a8", "i8"), ("fp8", "fp8e4nv"), ("fp8_fast", "fp8e4nv")):
        for tile, targets in shipped(f"grouped_{operation}"):
            constants = {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "EVEN_K": True, "FAST": operation == "fp8_fast",
                         "ACC": tl.int32 if kind == "i8" else tl.float32, "SIZE": 128}  # fmt: skip
            for tma in (True, False):
                loads = (
                    {"x_ptr": f"tensordesc<{kind}[{tile.BM}, {tile.BK}]>",
                     "w_ptr": f"tensordesc<{kind}[{tile.BN}, {tile.BK}]>"}
                    if tma else {"x_ptr": f"*{kind}", "w_ptr": f"*{kind}"}
                )  # fmt: skip
                on = tuple(target for target in targets if tma == (target >= 90))
                config = AotConfig({**constants, "TMA": tma}, targets=on, **tile.launch)
                if on:
                    types = integers | pointers | loads
                    entries.append(_entry(grouped_scaled_mm_kernel, types, (config,), ("N", "K", "stride_xm")))
    return entries


def _entry(
    kernel: triton.JITFunction, types: dict[str, str], configs: tuple[AotConfig, ...], divisible: tuple[str, ...]
) -> AotKernel:
    return AotKernel(kernel, {name: types[name] for name in kernel.arg_names if name in types}, configs, divisible)


def _quantize() -> list[AotKernel]:
    entries = []
    for dtype in ("*bf16", "*fp32"):
        types = {"w_ptr": dtype, "packed_ptr": "*i32", "scale_ptr": dtype, "flag_ptr": "*i32", "groups": "i32",
                 "groups_per_row": "i32", "row_stride": "i32"}  # fmt: skip
        aot_configs = tuple(
            AotConfig({"GROUP": group, "WORDS": group // 8, "GROUPS": WEIGHT_TILE // group, "CONTIGUOUS": contiguous})
            for group in (32, 128) for contiguous in (True, False)
        )  # fmt: skip
        entries.append(AotKernel(quantize_int4_kernel, types, aot_configs, divisible=("row_stride",)))
        for fp8 in (False, True):
            types = {"w_ptr": dtype, "values_ptr": "*u8" if fp8 else "*i8", "scale_ptr": "*fp32", "flag_ptr": "*i32",
                     "cols": "i32", "row_stride": "i32"}  # fmt: skip
            aot_configs = tuple(
                AotConfig({"HALF_RANGE": 448.0 if fp8 else 127.5, "FP8": fp8, "HARDWARE": hardware, "BLOCK": block,
                           "SINGLE": single}, num_warps=warps, targets=targets)
                for block, single, warps in ((2048, True, 2), (8192, True, 8), (4096, False, 4))
                for hardware, targets in ((False, (80,)), (True, (90, 100, 120)))
            )  # fmt: skip
            entries.append(AotKernel(quantize_rows_kernel, types, aot_configs, divisible=("cols", "row_stride")))
    for scale in ("*bf16", "*fp32"):
        types = {"packed_ptr": "*i32", "scale_ptr": scale, "out_ptr": "*bf16", "words": "i32"}
        aot_configs = tuple(AotConfig({"WORDS_PER_GROUP": words, "BLOCK": 512}) for words in (4, 16))
        entries.append(AotKernel(dequantize_int4_kernel, types, aot_configs))
    for fp8 in (False, True):
        types = {"values_ptr": "*u8" if fp8 else "*i8", "scale_ptr": "*fp32", "out_ptr": "*bf16",
                 "cols": "i32", "row_stride": "i32"}  # fmt: skip
        aot_configs = tuple(
            AotConfig({"FP8": fp8, "HARDWARE": hardware, "BLOCK": 2048}, targets=targets)
            for hardware, targets in ((False, (80,)), (True, (90, 100, 120)))
        )
        entries.append(AotKernel(dequantize_rows_kernel, types, aot_configs, divisible=("cols", "row_stride")))
    return entries


def _activations() -> list[AotKernel]:
    entries = []
    for fp8 in (False, True):
        types = {"x_ptr": "*bf16", "values_ptr": "*u8" if fp8 else "*i8", "scale_ptr": "*fp32", "cols": "i32",
                 "row_stride": "i32"}  # fmt: skip
        configs = tuple(
            AotConfig({"FP8": fp8, "HARDWARE": hardware, "BLOCK": block, "SINGLE": single}, warps, targets=targets)
            for block, warps, single in ((1024, 1, True), (8192, 8, True), (4096, 4, False))
            for hardware, targets in ((False, (80,)), (True, (90, 100, 120)))
        )
        entries.append(AotKernel(quantize_tokens_kernel, types, configs, ("cols", "row_stride")))
    return entries


def _between_products() -> list[AotKernel]:
    types = {"grad_ptr": "*bf16", "gate_up_ptr": "*bf16", "a_scale_ptr": "*fp32", "weight_ptr": "*fp32",
             "order_ptr": "*i64", "hidden_ptr": "*bf16", "router_ptr": "*fp32", "weighted_ptr": "*bf16",
             "cols": "i32"}  # fmt: skip
    entries = []
    for a, hardware, targets in (
        ("*bf16", False, (80, 90, 100, 120)), ("*i8", False, (80, 90, 100, 120)),
        ("*u8", False, (80,)), ("*u8", True, (90, 100, 120)),
    ):  # fmt: skip
        config = AotConfig({"QUANTIZED": a != "*bf16", "FP8": a == "*u8", "HARDWARE": hardware, "WEIGHTED": True,
                            "BLOCK": 1024}, targets=targets)  # fmt: skip
        entries.append(_entry(swiglu_backward_kernel, types | {"a_ptr": a}, (config,), ("cols",)))
    types = {"rows_ptr": "*bf16", "place_ptr": "*i64", "y_ptr": "*bf16", "cols": "i32"}
    entries.append(AotKernel(combine_kernel, types, (AotConfig({"TOP_K": 8, "BLOCK": 1024}),), ("cols",)))
    types = {"stack_ptr": "*bf16", "ends_ptr": "*i32", "size": "i32", "programs": "i32"}
    return [*entries, AotKernel(clear_unused_kernel, types, (AotConfig({"BLOCK": 1024}),), ("size", "programs"))]


def _marlin() -> list[AotKernel]:
    types = {"codes_ptr": "*i32", "packed_ptr": "*i32", "tiles": "i32", "row_blocks": "i32"}
    return [AotKernel(codes_from_marlin_kernel, types, (AotConfig({"TILES": 16}),), ("tiles",))]


def _checksum() -> list[AotKernel]:
    """For words without floats, BF16 and FP32. Integers are not specialized, so they are not divisible."""
    pointers = ("words_ptr", "rows_ptr", "inner_ptr", "outer_ptr", "table_ptr", "result_ptr")
    types = dict.fromkeys(pointers, "*i64") | dict.fromkeys(("count", "step", "tensors"), "i32")
    masks = ((0, 0), (0x7FFF7FFF7FFF7FFF, 0x0080008000800080), (0x7FFFFFFF7FFFFFFF, 0x0080000000800000))
    configs = tuple(AotConfig({"MASK": mask, "CARRY": carry, "BLOCK": 4096}, num_warps=8) for mask, carry in masks)
    rows = AotConfig({"BLOCK": 4096}, num_warps=8)
    return [_entry(checksum_kernel, types, configs, ()), _entry(checksum_rows_kernel, types, (rows,), ())]


KERNELS: list[AotKernel] = [
    *W4A16, *_scaled_mm(), *_grouped(), *_quantize(), *_activations(), *_between_products(), *_marlin(),
    *_checksum(),
]  # fmt: skip
