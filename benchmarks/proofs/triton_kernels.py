"""The types and configurations with which the wrappers of qarl/kernels/triton launch their kernels.

`triton_aot.py` compiles them for GPUs that need not be here, so that a configuration that spills registers or
does not fit is found before a GPU is at hand. tests/integration/kernels/test_triton.py finds a missing kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import triton.language as tl

from qarl.kernels.triton.between_products import (
    clear_unused_kernel,
    combine_kernel,
    route_kernel,
    swiglu_backward_kernel,
    swiglu_kernel,
)
from qarl.kernels.triton.chains import (
    log_softmax_backward_kernel,
    silu_and_mul_backward_kernel,
    turn_kernel,
)
from qarl.kernels.triton.checksum import checksum_kernel, checksum_rows_kernel
from qarl.kernels.triton.experts import (
    grouped_scaled_mm_kernel,
    grouped_w4a16_backward_kernel,
    grouped_w4a16_kernel,
)
from qarl.kernels.triton.norm_widths import VECTOR
from qarl.kernels.triton.norms import norm_tile, rms_norm_backward_kernel, rms_norm_kernel
from qarl.kernels.triton.planes import dequantize_planes_kernel, to_planes_kernel
from qarl.kernels.triton.quantize import (
    WEIGHT_TILE,
    codes_from_marlin_kernel,
    dequantize_int4_kernel,
    dequantize_rows_kernel,
    quantize_int4_kernel,
    quantize_rows_kernel,
    quantize_tokens_kernel,
)
from qarl.kernels.triton.router import router_kernel
from qarl.kernels.triton.scaled_mm import scaled_mm_kernel
from qarl.kernels.triton.tiles import Tile, tables
from qarl.kernels.triton.w4a16 import w4a16_backward_kernel
from qarl.kernels.triton.w4a16_forward import w4a16_kernel

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

    `types`: argument -> "*bf16", "*i32", "tensordesc<...>", ...; others are "i32", or constexprs of a configuration.
    Pointers are taken to be 16-byte aligned, and so are the integers in `divisible`; an integer of 1 is a constexpr,
    as Triton makes it one at a launch.
    """

    kernel: Any
    types: Mapping[str, str]
    configs: tuple[AotConfig, ...]
    divisible: tuple[str, ...] = field(default=())

    @property
    def signature(self) -> dict[str, str]:
        return {name: self.types.get(name, "i32") for name in self.kernel.arg_names}


def shipped(*operations: str, per_sm: bool = True) -> list[tuple[Tile, tuple[int, ...]]]:
    """Every tile in the tables of `operations`, with the targets it serves; `per_sm` tells tiles apart, or is 0."""
    targets: dict[Tile, tuple[int, ...]] = {}
    for kind, target in TARGETS.items():
        tiles = {rule.tile for name in operations for rule in tables()[kind][name]}
        for tile in tiles if per_sm else {tile._replace(per_sm=0) for tile in tiles}:
            targets[tile] = (*targets.get(tile, ()), target)
    return sorted(targets.items())


def rules_of(operation: str) -> list[str]:
    """Return the names of the tables of `operation`: its own, and that of its invariant sums if it has one."""
    names = (operation, f"{operation}_invariant")
    return [name for name in names if name in tables()["hopper"]]


POINTERS = {
    **dict.fromkeys(("x_ptr", "grad_ptr", "y_ptr", "dx_ptr", "bias_ptr", "scale_ptr"), "*bf16"),
    **dict.fromkeys(("x_scale_ptr", "w_scale_ptr", "workspace_ptr"), "*fp32"),
    **dict.fromkeys(("counter_ptr", "ends_ptr"), "*i32"),
    "token_ptr": "*i64",
    **dict.fromkeys(("packed_ptr", "planes_ptr"), "*i16"),
    "pairs_ptr": "*i32",
}
"""Of products."""
FP8_TARGETS = ((False, (80,)), (True, (90, 100, 120)))
"""HARDWARE, whether a GPU converts FP8 itself -> targets."""
EIGHT_BITS = (("w8a8", "i8"), ("fp8", "fp8e4nv"), ("fp8_fast", "fp8e4nv"))


def _w4a16(
    kernel: Any, operations: tuple[str, ...], even: str, divisible: tuple[str, ...], **more: int
) -> AotKernel:
    """Every tile of the tables with groups of 128, and with groups of 32 and a last block that is not whole."""
    configs = tuple(
        AotConfig(
            {
                "BM": tile.BM,
                "BN": tile.BN,
                "BK": tile.BK,
                "GROUP": group,
                even: group == 128,
                "PTX": True,
                **more,
            },
            targets=targets,
            **tile.launch,
        )
        for tile, targets in shipped(*operations, per_sm=bool(more))
        for group in (128, 32)
    )
    return AotKernel(kernel, POINTERS, configs, divisible)


def _eight_bits(
    tile: Tile, operation: str, kind: str, *, tma: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the constants of a tile, and the types of its pointers: descriptors for the tensor memory accelerator."""
    constants = {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "FAST": operation == "fp8_fast", "TMA": tma,
                 "ACC": tl.int32 if kind == "i8" else tl.float32}  # fmt: skip
    workspace = {"workspace_ptr": "*i32" if kind == "i8" else "*fp32"}
    loads = {
        "x_ptr": f"tensordesc<{kind}[{tile.BM}, {tile.BK}]>",
        "w_ptr": f"tensordesc<{kind}[{tile.BN}, {tile.BK}]>",
    }
    return constants, POINTERS | workspace | (loads if tma else dict.fromkeys(loads, f"*{kind}"))


def _scaled_mm() -> Iterator[AotKernel]:
    """Every tile with the tensor memory accelerator, as each program count needs it, and once with plain loads."""
    once: dict[str, Any] = {
        "PERSISTENT": False,
        "workspace_ptr": None,
        "counter_ptr": None,
        "parts": 1,
    }
    for operation, kind in EIGHT_BITS:
        for tile, targets in shipped(*rules_of(operation)):
            variants = (
                [{"PERSISTENT": False}, {**once, "PERSISTENT": True}] if tile.per_sm else [once]
            )
            for tma in (True, False):
                constants, types = _eight_bits(tile, operation, kind, tma=tma)
                on = tuple(target for target in targets if target >= 90) if tma else targets
                configs = tuple(
                    AotConfig(constants | {"EVEN_K": tma} | variant, targets=on, **tile.launch)
                    for variant in (variants if tma else variants[:1])
                )
                if on:
                    yield AotKernel(scaled_mm_kernel, types, configs, ("K", "stride_xm"))


def _grouped() -> Iterator[AotKernel]:
    """Every tile in the tables, with 128 experts."""
    for operation, kind in EIGHT_BITS:
        for tile, targets in shipped(f"grouped_{operation}"):
            for tma in (True, False):
                constants, types = _eight_bits(tile, operation, kind, tma=tma)
                on = tuple(target for target in targets if tma == (target >= 90))
                config = AotConfig(
                    constants | {"EVEN_K": True, "SIZE": 128}, targets=on, **tile.launch
                )
                if on:
                    yield AotKernel(
                        grouped_scaled_mm_kernel, types, (config,), ("N", "K", "stride_xm")
                    )


def _quantize() -> Iterator[AotKernel]:
    for dtype in ("*bf16", "*fp32"):
        types = {"w_ptr": dtype, "packed_ptr": "*i32", "scale_ptr": dtype, "flag_ptr": "*i32"}
        configs = tuple(
            AotConfig({"GROUP": group, "WORDS": group // 8, "GROUPS": WEIGHT_TILE // group, "CONTIGUOUS": contiguous})
            for group in (32, 128) for contiguous in (True, False)
        )  # fmt: skip
        yield AotKernel(quantize_int4_kernel, types, configs, ("row_stride",))
        for fp8 in (False, True):
            configs = tuple(
                AotConfig({"HALF_RANGE": 448.0 if fp8 else 127.5, "FP8": fp8, "HARDWARE": hardware, "BLOCK": block,
                           "SINGLE": single}, num_warps=warps, targets=targets)
                for block, single, warps in ((2048, True, 2), (8192, True, 8), (4096, False, 4))
                for hardware, targets in FP8_TARGETS
            )  # fmt: skip
            values = types | {"values_ptr": "*u8" if fp8 else "*i8", "scale_ptr": "*fp32"}
            yield AotKernel(quantize_rows_kernel, values, configs, ("cols", "row_stride"))
    for scale in ("*bf16", "*fp32"):
        configs = tuple(AotConfig({"WORDS_PER_GROUP": words, "BLOCK": 512}) for words in (4, 16))
        types = {"packed_ptr": "*i32", "scale_ptr": scale, "out_ptr": "*bf16"}
        yield AotKernel(dequantize_int4_kernel, types, configs)
    yield from _planes()
    for fp8 in (False, True):
        types = {
            "x_ptr": "*bf16",
            "values_ptr": "*u8" if fp8 else "*i8",
            "scale_ptr": "*fp32",
            "out_ptr": "*bf16",
        }
        configs = tuple(
            AotConfig({"FP8": fp8, "HARDWARE": hardware, "BLOCK": 2048}, targets=targets)
            for hardware, targets in FP8_TARGETS
        )
        yield AotKernel(dequantize_rows_kernel, types, configs, ("cols", "row_stride"))
        configs = tuple(
            AotConfig(
                {"FP8": fp8, "HARDWARE": hardware, "BLOCK": block, "SINGLE": single},
                warps,
                targets=targets,
            )
            for block, warps, single in ((1024, 1, True), (8192, 8, True), (4096, 4, False))
            for hardware, targets in FP8_TARGETS
        )
        yield AotKernel(quantize_tokens_kernel, types, configs, ("cols", "row_stride"))


def _planes() -> Iterator[AotKernel]:
    constants = {"BLOCKS": 16, "HALVES": 32}
    types = {"packed_ptr": "*i16", "planes_ptr": "*i16"}
    yield AotKernel(to_planes_kernel, types, (AotConfig(constants),), ("K",))
    types = {"planes_ptr": "*i16", "pairs_ptr": "*i32", "out_ptr": "*bf16"}
    configs = tuple(AotConfig({"GROUP": group, **constants}) for group in (32, 128))
    yield AotKernel(dequantize_planes_kernel, types, configs, ("K",))


def _between_products() -> Iterator[AotKernel]:
    types = {"grad_ptr": "*bf16", "gate_up_ptr": "*bf16", "a_scale_ptr": "*fp32", "weight_ptr": "*fp32",
             "order_ptr": "*i64", "hidden_ptr": "*bf16", "router_ptr": "*fp32", "weighted_ptr": "*bf16"}  # fmt: skip
    every = (False, (80, 90, 100, 120))
    for a, (hardware, targets) in (
        ("*bf16", every),
        ("*i8", every),
        *(("*u8", target) for target in FP8_TARGETS),
    ):
        constants = {
            "QUANTIZED": a != "*bf16",
            "FP8": a == "*u8",
            "HARDWARE": hardware,
            "WEIGHTED": True,
            "BLOCK": 1024,
        }
        yield AotKernel(
            swiglu_backward_kernel,
            types | {"a_ptr": a},
            (AotConfig(constants, targets=targets),),
            ("cols",),
        )
    types = {"rows_ptr": "*bf16", "slot_ptr": "*i64", "weight_ptr": "*fp32", "y_ptr": "*bf16"}
    configs = tuple(
        AotConfig({"TOP_K": 8, "WEIGHTED": weighted, "BLOCK": 1024}) for weighted in (False, True)
    )
    yield AotKernel(combine_kernel, types, configs, ("cols",))
    types = {"gate_up_ptr": "*bf16", "a_ptr": "*bf16"}
    yield AotKernel(swiglu_kernel, types, (AotConfig({"BLOCK": 1024}),), ("cols",))
    types = dict.fromkeys(("order_ptr", "token_ptr", "place_ptr"), "*i64")
    types |= {"ids_ptr": "*i32", "ends_ptr": "*i32"}
    yield AotKernel(route_kernel, types, (AotConfig({"TOP_K": 8, "BLOCK": 4096}, num_warps=8),))
    types = dict.fromkeys(("x_ptr", "weight_ptr", "logits_ptr"), "*bf16")
    configs = tuple(
        AotConfig({"BM": 64, "BN": 64, "BK": 128, "EVEN_K": even}) for even in (True, False)
    )
    yield AotKernel(router_kernel, types, configs, ("K", "stride_xm"))
    types = {"stack_ptr": "*bf16", "ends_ptr": "*i32"}
    yield AotKernel(clear_unused_kernel, types, (AotConfig({"BLOCK": 1024}),), ("size", "programs"))


def _norms() -> Iterator[AotKernel]:
    """Heads of 128, and the widths of models of 0.5B, 8B and 70B. Strides are not specialized, so not divisible."""
    pointers = ("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "total_ptr", "grad_ptr", "dx_ptr")
    types = {**dict.fromkeys(pointers, "*bf16"), "dw_ptr": "*fp32", "epsilon": "fp32"}
    widths = (128, 896, 4096, 8192)
    forward = [{"VECTOR": VECTOR, "RESIDUAL": residual} for residual in (False, True)]
    backward = [{"WEIGHT": weight} for weight in (False, True)]
    for kernel, flags in ((rms_norm_kernel, forward), (rms_norm_backward_kernel, backward)):
        yield AotKernel(
            kernel, types, tuple(_norm(width, more) for width in widths for more in flags)
        )


def _norm(width: int, more: Mapping[str, Any]) -> AotConfig:
    rows, block, warps = norm_tile(width)
    return AotConfig({"COLS": width, "ROWS": rows, "BLOCK": block, **more}, num_warps=warps)


def _chains() -> Iterator[AotKernel]:
    """Heads of 64 and 128, turned forth and back; logits in BF16 and in FP32."""
    pointers = ("grad_ptr", "gate_ptr", "up_ptr", "grad_gate_ptr", "grad_up_ptr")
    types = dict.fromkeys(pointers, "*bf16")
    yield AotKernel(silu_and_mul_backward_kernel, types, (AotConfig({"BLOCK": 1024}),), ("size",))
    turned = dict.fromkeys(("x_ptr", "cosine_ptr", "sine_ptr", "y_ptr"), "*bf16")
    configs = [
        AotConfig({"HALF": half, "PAIRS": half, "HEADS": 1024 // half, "BACK": back})
        for half in (32, 64)
        for back in (False, True)
    ]
    yield AotKernel(turn_kernel, turned, tuple(configs), ("token_stride", "head_stride"))
    of_rows = {"log_sum_ptr": "*fp32", "token_ptr": "*i64", "grad_ptr": "*fp32", "inverse": "fp32"}
    for logits in ("*bf16", "*fp32"):
        types = {"logits_ptr": logits, "out_ptr": logits, **of_rows}
        config = AotConfig({"BLOCK": 4096}, num_warps=8)
        yield AotKernel(log_softmax_backward_kernel, types, (config,), ("cols",))


def _publish() -> Iterator[AotKernel]:
    """Codes out of Marlin's layout, and checksums of words without floats, BF16 and FP32.

    Integers of a checksum are not specialized, so they are not divisible."""
    types = {"codes_ptr": "*i32", "packed_ptr": "*i32"}
    yield AotKernel(codes_from_marlin_kernel, types, (AotConfig({"TILES": 16}),), ("tiles",))
    pointers = ("words_ptr", "rows_ptr", "inner_ptr", "outer_ptr", "table_ptr", "result_ptr")
    types = dict.fromkeys(pointers, "*i64")
    masks = (
        (0, 0),
        (0x7FFF7FFF7FFF7FFF, 0x0080008000800080),
        (0x7FFFFFFF7FFFFFFF, 0x0080000000800000),
    )
    configs = tuple(
        AotConfig({"MASK": mask, "CARRY": carry, "BLOCK": 4096}, num_warps=8)
        for mask, carry in masks
    )
    yield AotKernel(checksum_kernel, types, configs)
    yield AotKernel(checksum_rows_kernel, types, (AotConfig({"BLOCK": 4096}, num_warps=8),))


KERNELS: list[AotKernel] = [
    _w4a16(w4a16_kernel, ("w4a16", "w4a16_invariant"), "EVEN_K", ("K", "stride_xm")),
    _w4a16(w4a16_backward_kernel, ("w4a16_backward",), "EVEN_N", ("K", "stride_gm")),
    _w4a16(grouped_w4a16_kernel, ("grouped_w4a16", "grouped_w4a16_invariant"), "EVEN_K", ("N", "K", "stride_xm"),
           SIZE=128),
    _w4a16(grouped_w4a16_backward_kernel, ("grouped_w4a16_backward",), "EVEN_N", ("N", "K", "stride_gm"), SIZE=128),
    *_scaled_mm(), *_grouped(), *_quantize(), *_between_products(), *_norms(), *_chains(), *_publish(),
]  # fmt: skip
