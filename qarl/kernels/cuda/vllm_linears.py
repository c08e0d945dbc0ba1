"""vLLM's CUDA operators as linear kernels. The rollout engine runs the same operators on NVIDIA GPUs.

    vllm_machete        W4A16 on capability 9.0, K % 64 = 0, N % 128 = 0, groups of 64 or 128
    vllm_marlin         all other W4A16 from capability 8.0 on, groups of 32, 64 or 128
    vllm_cutlass_int8   W8A8: `scaled_int8_quant`, `cutlass_scaled_mm`
    vllm_cutlass_fp8    FP8: `scaled_fp8_quant` per token, `cutlass_scaled_mm`

Each kernel does the same as a class of vLLM, for example MacheteLinearKernel (vllm/model_executor/kernels/linear/). It
supports a layer only if vLLM on this machine would use that class. Both supported releases have the same arguments for
these operators, and `qarl.vllm_versions` rejects others.

Engine and trainer can still differ in three ways that this module cannot detect:

    fused layers     the engine multiplies q, k and v (gate and up) at once. vLLM's choice of a class, its tiles and its
                     splits over K depend on N, so rounding may differ
    linear_backend   an engine argument of vLLM that overrides its choice of a class. QaRL does not set it
    compilation      with torch.compile, vLLM quantizes activations by compiled PyTorch, not by these operators

The Triton kernels compute dX from the wire tensors, so no BF16 copy of a weight is needed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from qarl.kernels.base import ExpertsShape, LinearKernel, PreparedWeight, int4_bytes
from qarl.kernels.speed import on_hopper
from qarl.kernels.triton.linears import TritonW4A16Linear, TritonW8A8Linear
from qarl.process import configure_vllm_process, vllm_missing
from qarl.schemes.base import FP8_FP8, INT4_BF16, INT8_INT8, Scheme
from qarl.vllm_versions import describe_experts, unsupported_release

_OPS = "vllm._custom_ops"
_MARLIN = "vllm.model_executor.layers.quantization.utils.marlin_utils"
_COMPRESSED_TENSORS = "vllm.model_executor.layers.quantization.compressed_tensors"
MOE = "vllm.model_executor.layers.fused_moe"


class PreparedPacked(NamedTuple):
    """`weight` and `scales` in the operator's layout. `out_features` is N. Only Marlin needs `workspace`."""

    weight: torch.Tensor
    scales: torch.Tensor
    out_features: int
    workspace: torch.Tensor | None = None


@cache
def _unusable(operator: str) -> str | None:
    """Return why the operator cannot be called in this process, or None if it can."""
    if missing := vllm_missing():
        return missing
    configure_vllm_process()
    importlib.import_module(_OPS)  # registers torch.ops._C
    if not hasattr(torch.ops._C, operator):
        return f"this vLLM build has no {operator}"
    return unsupported_release()


def why_not_here(device: torch.device, operator: str, *, capability: tuple[int, int]) -> str | None:
    """Return why vLLM's CUDA operators, including `operator`, cannot be called on `device`, or None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"runs on NVIDIA GPUs, not on {'AMD' if device.type == 'cuda' else device.type}"
    if not torch.cuda.is_available():
        return "there is no GPU in this machine"
    if torch.cuda.get_device_capability(device) < capability:
        return f"needs compute capability {capability[0]}.{capability[1]}"
    return _unusable(operator)


@cache
def _not_the_engines(kernel: str, shape: tuple[int, int], group_size: int) -> str | None:
    """Return None if vLLM uses the class `kernel` for int4 weights [N, K], else a text that names the class it uses."""
    try:
        chosen = chosen_int4_kernel(shape, shape, group_size)
    except ValueError as error:
        chosen = f"nothing ({' '.join(str(error).split())})"
    return None if chosen == kernel else f"here vLLM itself runs {chosen}"


def chosen_int4_kernel(shape: tuple[int, int], full_shape: tuple[int, int], group_size: int) -> str:
    """Return the name of the class that vLLM uses for one GPU's part [N, K] of an int4 weight of `full_shape` [N, K].

    Raise ValueError if no class supports the weight. The message has the reason of each class.
    """
    from vllm.model_executor.kernels import linear as kernels

    layer = kernels.MPLinearLayerConfig(
        full_weight_shape=full_shape[::-1],
        partition_weight_shape=shape[::-1],
        weight_type=uint4b8(),
        act_type=torch.bfloat16,
        group_size=group_size,
        zero_points=False,
        has_g_idx=False,
    )
    return str(kernels.choose_mp_linear_kernel(layer).__name__)


@cache
def _unusable_moe() -> str | None:
    """Return why vLLM's functions cannot be called, or None. Call `why_not_here` first."""
    if missing := [
        name for name in ("moe_wna16_marlin_gemm", "moe_sum") if not hasattr(torch.ops._moe_C, name)
    ]:
        return f"this vLLM build has no {', '.join(missing)}"
    return unsupported_release()


def why_not_experts(
    scheme: Scheme, device: torch.device, shape: ExpertsShape, classes: tuple[str, ...]
) -> str | None:
    """Return why the functions behind `classes` cannot be used, or None if they can.

    One possible reason is that vLLM on this machine uses different classes.
    """
    why_not = why_not_here(device, "cutlass_moe_mm", capability=(8, 0)) or _unusable_moe()
    if why_not:
        return why_not
    chosen = chosen_experts_kernel(scheme, shape)
    return None if chosen in classes else f"here vLLM itself runs {chosen}"


@cache
def chosen_experts_kernel(scheme: Scheme, shape: ExpertsShape) -> str:
    """Return the name of the class that vLLM uses for experts of this scheme and shape on one GPU of this machine.

    If there is none, return a text that begins with "nothing" and gives the reason.
    """
    config = importlib.import_module(f"{MOE}.config")
    quantization = importlib.import_module(f"{_COMPRESSED_TENSORS}.compressed_tensors")
    methods = importlib.import_module(
        f"{_COMPRESSED_TENSORS}.compressed_tensors_moe.compressed_tensors_moe"
    )
    layer: Any = torch.nn.Module()
    layer.moe_config = config.FusedMoEConfig(
        num_experts=shape.experts,
        num_local_experts=shape.experts,
        num_logical_experts=shape.experts,
        experts_per_token=shape.top_k,
        hidden_dim=shape.hidden,
        intermediate_size=shape.intermediate,
        activation=silu(),
        device="cuda",
        routing_method=config.RoutingMethodType.Renormalize,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )
    describe_experts(layer, shape.hidden)
    vllm_quantization = quantization.CompressedTensorsConfig.from_config(
        _quantization_config(scheme)
    )
    try:
        method = methods.CompressedTensorsMoEMethod.get_moe_method(
            vllm_quantization, layer, "experts"
        )
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"nothing ({' '.join(str(error).split()) or type(error).__name__})"
    return str((getattr(method, "experts_cls", None) or type(method)).__name__)


def _quantization_config(scheme: Scheme) -> dict[str, Any]:
    """Return the scheme's `quantization_config`, as in config.json, for every layer."""
    config = scheme.quantization_config()
    for group in config["config_groups"].values():
        group["targets"] = ["re:.*"]
    return config


def silu() -> Any:
    return importlib.import_module(f"{MOE}.activation").MoEActivation.SILU


def uint4b8() -> Any:
    """Return vLLM's type for our int4: unsigned, stored with an offset of 8."""
    from vllm.scalar_type import scalar_types

    return scalar_types.uint4b8


class _PackedLinear(LinearKernel):
    """Base of the two W4A16 kernels."""

    operands = INT4_BF16
    computes_input_gradient = True
    input_gradient_by = TritonW4A16Linear


class VllmMacheteLinear(_PackedLinear):
    """W4A16 by vLLM's operators `machete_prepack_B` and `machete_mm`."""

    name = "vllm_machete"
    group_sizes = (64, 128)
    speed = on_hopper("bf16", "vllm_machete", 0.650, 0.721, 0.668)

    @staticmethod
    def unavailable(device: torch.device, shape: tuple[int, int]) -> str | None:
        why_not = why_not_here(device, "machete_mm", capability=(9, 0))
        return why_not or _not_the_engines("MacheteLinearKernel", shape, 64)

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        return int4_bytes(scheme, shape)

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedPacked:
        """Repack the weight, int32 [K/8, N] with contiguous columns; transpose the scales to [K/g, N]."""
        from vllm import _custom_ops as ops

        packed = tensors["weight_packed"]
        scale = tensors["weight_scale"]
        weight = ops.machete_prepack_B(
            packed.contiguous().t(),
            a_type=scale.dtype,
            b_type=uint4b8(),
            group_scales_type=scale.dtype,
        )
        return PreparedPacked(weight, scale.t().contiguous(), len(packed))

    @staticmethod
    def linear(
        x: torch.Tensor, prepared: PreparedPacked, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [M, K] BF16 -> [M, N] BF16. The bias is added to the rounded product."""
        from vllm import _custom_ops as ops

        y: torch.Tensor = ops.machete_mm(
            a=x.contiguous(),
            b_q=prepared.weight,
            b_type=uint4b8(),
            b_group_scales=prepared.scales,
            b_group_size=x.shape[1] // prepared.scales.shape[0],
        )
        return y if bias is None else y.add_(bias)


class VllmMarlinLinear(_PackedLinear):
    """W4A16 by `gptq_marlin_repack` and `marlin_gemm`, with FP32 reductions. Shapes are padded to Marlin's tiles."""

    name = "vllm_marlin"
    group_sizes = (32, 64, 128)
    speed = on_hopper("bf16", "vllm_marlin", 0.350, 0.364, 0.317)

    @staticmethod
    def unavailable(device: torch.device, shape: tuple[int, int]) -> str | None:
        if os.environ.get("VLLM_MARLIN_INPUT_DTYPE"):
            return "VLLM_MARLIN_INPUT_DTYPE is set, so vLLM quantizes the activations"
        why_not = why_not_here(device, "marlin_gemm", capability=(8, 0))
        # Ask for groups of 32, which Machete does not support. With other groups vLLM would name Machete if it fits.
        return why_not or _not_the_engines("MarlinLinearKernel", shape, 32)

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        return int4_bytes(scheme, shape)

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedPacked:
        """Convert the weight to Marlin's tiles of 16 by 64, and permute the scales [K/g, N] to match."""
        from vllm import _custom_ops as ops

        marlin = importlib.import_module(_MARLIN)
        packed = tensors["weight_packed"]
        scale = tensors["weight_scale"]
        n = packed.shape[0]
        k = packed.shape[1] * 8
        group = k // scale.shape[1]
        padded_n, padded_k = marlin.marlin_padded_nk(n, k, group)
        weight = ops.gptq_marlin_repack(
            marlin.marlin_pad_qweight(packed.t().contiguous(), n, k, padded_n, padded_k),
            perm=_nothing(packed.device),
            size_k=padded_k,
            size_n=padded_n,
            num_bits=4,
        )
        scales = marlin.marlin_permute_scales(
            marlin.marlin_pad_scales(scale.t().contiguous(), n, k, padded_n, padded_k, group),
            size_k=padded_k,
            size_n=padded_n,
            group_size=group,
        )
        workspace = marlin.marlin_make_workspace_new(packed.device)
        return PreparedPacked(weight, scales, n, workspace)

    @staticmethod
    def linear(
        x: torch.Tensor, prepared: PreparedPacked, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [M, K] BF16 -> [M, N] BF16. The bias is added before rounding."""
        marlin = importlib.import_module(_MARLIN)
        n = prepared.out_features
        k = x.shape[1]
        nothing = _nothing(x.device)
        if bias is not None:
            bias = marlin.marlin_permute_bias(
                marlin.marlin_pad_dim(bias, n, prepared.scales.shape[1])
            )
        y: torch.Tensor = marlin.apply_gptq_marlin_linear(
            input=x.contiguous(),
            weight=prepared.weight,
            weight_scale=prepared.scales,
            weight_zp=nothing,
            g_idx=nothing,
            g_idx_sort_indices=nothing,
            workspace=prepared.workspace,
            wtype=uint4b8(),
            output_size_per_partition=n,
            input_size_per_partition=k,
            is_k_full=True,
            bias=bias,
        )
        return y


class _CutlassLinear(LinearKernel):
    """Base of the two 8-bit kernels. `cutlass_scaled_mm` computes (sum * token scale) * weight scale."""

    computes_input_gradient = True
    input_gradient_by = TritonW8A8Linear
    rounds_like_cuda = True

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedWeight:
        """Return the wire tensors themselves. The operator reads the weight as [K, N] with contiguous columns."""
        return PreparedWeight(tensors["weight"].contiguous(), tensors["weight_scale"])

    @classmethod
    def linear(
        cls, x: torch.Tensor, prepared: PreparedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        from vllm import _custom_ops as ops

        rows = len(x)
        if rows < cls.least_rows:
            x = F.pad(x, (0, 0, 0, cls.least_rows - rows))
        values, scale = cls.quantize_input(x)
        y: torch.Tensor = ops.cutlass_scaled_mm(
            values,
            prepared.weight.t(),
            scale_a=scale,
            scale_b=prepared.scale,
            out_dtype=x.dtype,
            bias=bias,
        )
        return y[:rows]


class VllmCutlassInt8Linear(_CutlassLinear):
    """W8A8 by the operators of vLLM's CutlassInt8ScaledMMLinearKernel."""

    operands = INT8_INT8
    name = "vllm_cutlass_int8"
    row_invariant = True  # int8 sums are exact, and each token has its own scale
    speed = on_hopper("int8", "vllm_cutlass_int8", 0.555, 0.696, 0.680)

    @staticmethod
    def unavailable(device: torch.device, shape: tuple[int, int]) -> str | None:
        if why_not := why_not_here(device, "cutlass_scaled_mm", capability=(8, 0)):
            return why_not
        if torch.cuda.get_device_capability(device) >= (10, 0):
            return "vLLM's CUTLASS supports int8 products only up to capability 9.0"
        return _off_the_tiles(shape) or _disabled("CutlassInt8ScaledMMLinearKernel")

    @staticmethod
    def quantize_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm import _custom_ops as ops

        values, scale, _ = ops.scaled_int8_quant(x.contiguous(), None, None, symmetric=True)
        return values, scale


class VllmCutlassFP8Linear(_CutlassLinear):
    """FP8 by the operators of vLLM's CutlassFP8ScaledMMLinearKernel, for weights with a scale per channel.

    On capability 9.0 CUTLASS never splits K, but with up to 64 rows vLLM swaps the operands, and the scales with them
    (csrc/libtorch_stable/quantization/w8a8/cutlass/c3x/scaled_mm_sm90_fp8_dispatch.cuh). Then the sum is multiplied by
    the weight's scale first, otherwise by the token's, which changed 4e-6 of the outputs on an H200."""

    operands = FP8_FP8
    name = "vllm_cutlass_fp8"
    speed = on_hopper("fp8", "vllm_cutlass_fp8", 0.523, 0.650, 0.634)
    least_rows = 65
    row_invariant = True  # padded to `least_rows`, as the engine's at level `model`

    @staticmethod
    def unavailable(device: torch.device, shape: tuple[int, int]) -> str | None:
        forced = os.environ.get("VLLM_TEST_FORCE_FP8_MARLIN", "")
        if forced.strip().lower() in ("1", "true"):  # as vllm/envs.py reads it
            return "VLLM_TEST_FORCE_FP8_MARLIN is set"
        why_not = why_not_here(device, "cutlass_scaled_mm", capability=(8, 9))
        return why_not or _off_the_tiles(shape) or _disabled("CutlassFP8ScaledMMLinearKernel")

    @staticmethod
    def quantize_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm import _custom_ops as ops

        values, scale = ops.scaled_fp8_quant(x.contiguous(), use_per_token_if_dynamic=True)
        return values, scale


def _off_the_tiles(shape: tuple[int, int]) -> str | None:
    """Return why CUTLASS cannot be used for weights [N, K], or None if it can."""
    return (
        f"needs N and K in multiples of 16, not {list(shape)}"
        if shape[0] % 16 or shape[1] % 16
        else None
    )


def _disabled(kernel: str) -> str | None:
    names = os.environ.get("VLLM_DISABLED_KERNELS", "").split(",")
    return f"VLLM_DISABLED_KERNELS names {kernel}" if kernel in names else None


@cache
def _nothing(device: torch.device) -> torch.Tensor:
    """Return an empty tensor. For Marlin it means: no zero points, and columns in their usual order."""
    return torch.empty(0, dtype=torch.int32, device=device)
