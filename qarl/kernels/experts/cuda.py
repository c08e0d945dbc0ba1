"""vLLM's fused mixture-of-experts kernels, which the rollout engine runs on NVIDIA GPUs.

    vllm_marlin_experts    W4A16: `fused_marlin_moe`, as in MarlinExperts
    vllm_cutlass_experts   FP8 on capability 9.0: `run_cutlass_moe_fp8`, as in CutlassExpertsFp8
    vllm_triton_experts    W8A8; FP8 on capability 8.9: `fused_experts`, with the kernels and tiles of TritonExperts

A kernel is used only if vLLM's `CompressedTensorsMoEMethod.get_moe_method` chooses the kernel's class for a layer of
the same sizes. The kernels call the functions behind the classes, with the arguments of vLLM 0.24.0 and 0.29.0. The
classes themselves need the engine's workspace, which is sized for the engine's largest batch.

Engine and trainer can still differ in three ways:

- tensor or expert parallel rollouts have different tiles, and a sum over ranks
- engine arguments can override vLLM's choice of a class; QaRL does not set them
- Marlin's and Triton's tiles depend on the number of rows (vllm-project/vllm#46639)

The engine cannot run W8A8 experts with vLLM 0.24, because TritonExperts rejects int8 rows. W8A8 experts quantize
activations by `per_token_quant_int8`, which rounds halves away from zero, unlike W8A8 linears.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from qarl.kernels.cuda.vllm_ops import uint4b8, why_not_here
from qarl.kernels.experts.grouped import ExpertsKernel, ExpertsShape
from qarl.kernels.int4 import CODES, MARLIN, SCALES, to_marlin
from qarl.vllm_versions import describe_experts, moe_sum, unsupported_release

_UTILS = "vllm.model_executor.layers.quantization.utils"
_MOE = "vllm.model_executor.layers.fused_moe"
_COMPRESSED_TENSORS = "vllm.model_executor.layers.quantization.compressed_tensors"


class Experts(NamedTuple):
    """`gate_up` [E, 2I, H] and `down` [E, H, I] with their scales, in the layout of vLLM's function."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor
    down_scale: torch.Tensor


@cache
def _unusable() -> str | None:
    """Return why vLLM's functions cannot be called, or None. Call `why_not_here` first, to import the operators."""
    if missing := [name for name in ("moe_wna16_marlin_gemm", "moe_sum") if not hasattr(torch.ops._moe_C, name)]:
        return f"this vLLM build has no {', '.join(missing)}"
    return unsupported_release()


def _why_not(
    scheme: str, device: torch.device, shape: ExpertsShape, group_size: int | None, classes: tuple[str, ...]
) -> str | None:
    """Return why the functions behind `classes` cannot be used, or None if they can.

    One possible reason is that vLLM on this machine uses different classes.
    """
    why_not = why_not_here(device, "cutlass_moe_mm", capability=(8, 0)) or _unusable()
    if why_not:
        return why_not
    chosen = engines_choice(scheme, shape, group_size)
    return None if chosen in classes else f"here vLLM itself runs {chosen}"


@cache
def engines_choice(scheme: str, shape: ExpertsShape, group_size: int | None) -> str:
    """Return the name of the class that vLLM uses for experts of this scheme and shape on one GPU of this machine.

    If there is none, return a text that begins with "nothing" and gives the reason.
    """
    config = importlib.import_module(f"{_MOE}.config")
    quantization = importlib.import_module(f"{_COMPRESSED_TENSORS}.compressed_tensors")
    methods = importlib.import_module(f"{_COMPRESSED_TENSORS}.compressed_tensors_moe.compressed_tensors_moe")
    layer: Any = torch.nn.Module()
    layer.moe_config = config.FusedMoEConfig(
        num_experts=shape.experts,
        num_local_experts=shape.experts,
        num_logical_experts=shape.experts,
        experts_per_token=shape.top_k,
        hidden_dim=shape.hidden,
        intermediate_size=shape.intermediate,
        activation=_silu(),
        device="cuda",
        routing_method=config.RoutingMethodType.Renormalize,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )
    describe_experts(layer, shape.hidden)
    given = quantization.CompressedTensorsConfig.from_config(_quantization_config(scheme, group_size))
    try:
        method = methods.CompressedTensorsMoEMethod.get_moe_method(given, layer, "experts")
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"nothing ({' '.join(str(error).split()) or type(error).__name__})"
    return str((getattr(method, "experts_cls", None) or type(method)).__name__)


def _quantization_config(scheme: str, group_size: int | None) -> dict[str, Any]:
    """Return a `quantization_config`, as in config.json, that quantizes every layer."""
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    preset, form = {
        "w4a16": ("W4A16", "pack-quantized"),
        "w8a8": ("W8A8", "int-quantized"),
        "fp8": ("FP8_DYNAMIC", "float-quantized"),
    }[scheme]
    group = preset_name_to_scheme(preset, ["re:.*"])
    group.format, group.weights.group_size = form, group_size
    config = QuantizationConfig(config_groups={"group_0": group}, format=form, quantization_status="compressed")
    return config.model_dump(mode="json", exclude_none=True)


def _silu() -> Any:
    return importlib.import_module(f"{_MOE}.activation").MoEActivation.SILU


class VllmMarlinExperts(ExpertsKernel):
    """W4A16 by `fused_marlin_moe`. As in MarlinExperts, vLLM's `moe_sum` adds up a token's experts."""

    name = "vllm_marlin_experts"
    layout = MARLIN

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: ExpertsShape, group_size: int | None) -> str | None:
        if os.environ.get("VLLM_MARLIN_INPUT_DTYPE"):
            return "VLLM_MARLIN_INPUT_DTYPE is set, so vLLM quantizes the activations"
        why_not = _why_not(scheme_name, device, shape, group_size, ("MarlinExperts",))
        if why_not:
            return why_not
        if shape.intermediate % 64:
            return f"vLLM pads an intermediate size of {shape.intermediate} to a multiple of 64"
        if group_size is not None and (shape.intermediate <= group_size) != (shape.hidden <= group_size):
            sizes = f"gate and up have {shape.hidden} columns and down has {shape.intermediate}"
            return f"{sizes}, but vLLM cannot mix one group per row with several groups per row"
        return None

    @staticmethod
    def prepare(gate_up: Mapping[str, torch.Tensor], down: Mapping[str, torch.Tensor]) -> Experts:
        """Convert to Marlin's layout: codes int32 [E, K/16, 2N], and scales BF16 [E, K/g, N] permuted to match.

        The stacks may already be in this layout.
        """
        stacks = [each if CODES in each else to_marlin(each) for each in (gate_up, down)]
        return Experts(*(each[CODES] for each in stacks), *(each[SCALES] for each in stacks))

    @staticmethod
    def forward(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, prepared: Experts) -> torch.Tensor:
        experts = len(prepared.gate_up)
        nothing = _no_columns(experts, x.device)
        run = importlib.import_module(f"{_MOE}.experts.marlin_moe").fused_marlin_moe
        y: torch.Tensor = run(
            hidden_states=x,
            w1=prepared.gate_up,
            w2=prepared.down,
            bias1=None,
            bias2=None,
            w1_scale=prepared.gate_up_scale,
            w2_scale=prepared.down_scale,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            quant_type_id=uint4b8().id,
            global_num_experts=experts,
            moe_sum=moe_sum,
            g_idx1=nothing,
            g_idx2=nothing,
            sort_indices1=nothing,
            sort_indices2=nothing,
            is_k_full=True,
        )
        return y


@cache
def _no_columns(experts: int, device: torch.device) -> torch.Tensor:
    """Return an empty tensor, which tells Marlin that the columns have no special order."""
    return torch.empty(experts, 0, dtype=torch.int32, device=device)


class _EightBitExperts(ExpertsKernel):
    """Base of the two 8-bit kernels."""

    @staticmethod
    def prepare(gate_up: Mapping[str, torch.Tensor], down: Mapping[str, torch.Tensor]) -> Experts:
        """Return the wire tensors themselves."""
        weights = (tensors["weight"].contiguous() for tensors in (gate_up, down))
        scales = (tensors["weight_scale"].contiguous() for tensors in (gate_up, down))
        return Experts(*weights, *scales)

    @staticmethod
    def quantize(scheme_name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made: tuple[torch.Tensor, torch.Tensor]
        if scheme_name == "w8a8":
            made = importlib.import_module(f"{_UTILS}.int8_utils").per_token_quant_int8(x.contiguous())
        else:
            from vllm import _custom_ops as ops

            made = ops.scaled_fp8_quant(x.contiguous(), use_per_token_if_dynamic=True)
        return made


class VllmTritonExperts(_EightBitExperts):
    """W8A8 and FP8 by vLLM's Triton kernel."""

    name = "vllm_triton_experts"

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: ExpertsShape, group_size: int | None) -> str | None:
        return _why_not(scheme_name, device, shape, group_size, ("TritonExperts",))

    @staticmethod
    def forward(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, prepared: Experts) -> torch.Tensor:
        config = importlib.import_module(f"{_MOE}.config")
        scales = {"w1_scale": prepared.gate_up_scale, "w2_scale": prepared.down_scale}
        if prepared.gate_up.dtype == torch.int8:
            quant_config = config.int8_w8a8_moe_quant_config(
                **scales, a1_scale=None, a2_scale=None, per_act_token_quant=True
            )
        else:
            quant_config = config.fp8_w8a8_moe_quant_config(**scales, per_act_token_quant=True, per_out_ch_quant=True)
        y: torch.Tensor = importlib.import_module(f"{_MOE}.fused_moe").fused_experts(
            hidden_states=x,
            w1=prepared.gate_up,
            w2=prepared.down,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            quant_config=quant_config,
        )
        return y


class VllmCutlassExperts(_EightBitExperts):
    """FP8 by CUTLASS's grouped product. Not on capability 10.0, because vLLM uses Triton there for up to 8 tokens."""

    name = "vllm_cutlass_experts"

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: ExpertsShape, group_size: int | None) -> str | None:
        why_not = _why_not(scheme_name, device, shape, group_size, ("TritonOrCutlassExperts", "CutlassExpertsFp8"))
        if why_not:
            return why_not
        if torch.cuda.get_device_capability(device) >= (10, 0):
            return "from capability 10.0 on vLLM's choice depends on the number of tokens"
        sizes = (shape.hidden, shape.intermediate)
        return f"needs sizes in multiples of 16, not {list(sizes)}" if any(size % 16 for size in sizes) else None

    @classmethod
    def forward(
        cls, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, prepared: Experts
    ) -> torch.Tensor:
        experts, hidden, intermediate = prepared.down.shape
        rows = topk_ids.numel()
        values, scale = cls.quantize("fp8", x)
        output = torch.empty_like(x)
        by_hidden, by_intermediate, by_both = (
            _filled(experts, size, x.device) for size in (hidden, intermediate, 2 * intermediate)
        )
        importlib.import_module(f"{_MOE}.experts.cutlass_moe").run_cutlass_moe_fp8(
            output=output,
            hidden_states=values,
            w1=prepared.gate_up,
            w2=prepared.down,
            topk_ids=topk_ids,
            activation=_silu(),
            global_num_experts=experts,
            expert_map=None,
            w1_scale=prepared.gate_up_scale,
            w2_scale=prepared.down_scale,
            a1q_scale=scale,
            a2_scale=None,
            ab_strides1=by_hidden,
            ab_strides2=by_intermediate,
            c_strides1=by_both,
            c_strides2=by_hidden,
            workspace13=x.new_empty(rows, max(2 * intermediate, hidden)),
            workspace2=x.new_empty(rows, max(intermediate, hidden)),
            expert_num_tokens=None,
            out_dtype=x.dtype,
            per_act_token=True,
            per_out_ch=True,
            use_batched_format=False,
            topk_weights=topk_weights,
            permute_scratch=None,
        )
        return output


@cache
def _filled(experts: int, value: int, device: torch.device) -> torch.Tensor:
    """Return int64 [E] filled with `value`, the stride that CUTLASS reads for each expert."""
    return torch.full((experts,), value, dtype=torch.int64, device=device)
