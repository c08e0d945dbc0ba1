"""vLLM's kernels for layers of experts on GPUs. The rollout engine runs the same operators.

    vllm_marlin_experts    W4A16: `fused_marlin_moe`, as in MarlinExperts
    vllm_cutlass_experts   FP8 on capability 9.0: `run_cutlass_moe_fp8`, as in CutlassExpertsFp8
    vllm_triton_experts    W8A8; FP8 on capability 8.9: `fused_experts`, with the kernels and tiles of TritonExperts

CUTLASS's FP8 product swaps its operands, and with them the order in which the scales multiply a sum, for up to 64 pairs
of a token and an expert (`run_cutlass_moe_fp8`; csrc/.../cutlass/moe/grouped_mm_c3x_sm90.cu). From 65 on it has one
configuration for a weight, and never splits a sum. So trainer and engine never call it with fewer (`least_pairs`).

A kernel is used only if vLLM's `CompressedTensorsMoEMethod.get_moe_method` chooses the kernel's class for a layer of
the same sizes. The kernels call the functions behind the classes, with the arguments of both supported releases. The
classes themselves need the engine's workspace, which is sized for the engine's largest batch. Engine and trainer can
still differ in three ways:

- tensor or expert parallel rollouts have different tiles, and a sum over ranks
- engine arguments can override vLLM's choice of a class; QaRL does not set them
- Marlin's and Triton's tiles depend on the number of rows (vllm-project/vllm#46639), and Marlin's sums are split by the
  number of all tiles

The older release cannot run W8A8 experts, because its TritonExperts rejects int8 rows. `per_token_quant_int8` rounds
halves away from zero, unlike W8A8 linears.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import NamedTuple

import torch

from qarl.kernels.base import (
    ExpertsKernel,
    ExpertsShape,
    Tensors,
    int4_bytes,
    with_least_pairs,
)
from qarl.kernels.cuda.vllm_linears import MOE, silu, uint4b8, why_not_experts
from qarl.kernels.int4 import CODES, MARLIN, SCALES, to_marlin
from qarl.schemes.base import FP8_FP8, INT4_BF16, INT8_INT8, Operands, Scheme
from qarl.vllm_versions import moe_sum


class Experts(NamedTuple):
    """`gate_up` [E, 2I, H] and `down` [E, H, I] with their scales, in the layout of vLLM's function."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor
    down_scale: torch.Tensor


class VllmMarlinExperts(ExpertsKernel):
    """W4A16 by `fused_marlin_moe`. As in MarlinExperts, vLLM's `moe_sum` adds up a token's experts."""

    name = "vllm_marlin_experts"
    operands = (INT4_BF16,)
    layout = MARLIN
    device_type = "cuda"
    engine_classes = ("MarlinExperts",)

    @classmethod
    def unavailable(cls, scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        if os.environ.get("VLLM_MARLIN_INPUT_DTYPE"):
            return "VLLM_MARLIN_INPUT_DTYPE is set, so vLLM quantizes the activations"
        group_size = scheme.group_size
        why_not = why_not_experts(scheme, device, shape, cls.engine_classes)
        if why_not:
            return why_not
        if shape.intermediate % 64:
            return f"vLLM pads an intermediate size of {shape.intermediate} to a multiple of 64"
        if group_size is None:
            return None
        one_group = [columns <= group_size for columns in (shape.hidden, shape.intermediate)]
        if any(one_group) and not all(one_group):
            sizes = f"gate and up have {shape.hidden} columns and down has {shape.intermediate}"
            return f"{sizes}, but vLLM cannot mix one group per row with several groups per row"
        return None

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        return int4_bytes(scheme, shape)

    @staticmethod
    def prepare(gate_up: Tensors, down: Tensors, operands: Operands) -> Experts:
        """Convert to Marlin's layout: codes int32 [E, K/16, 2N], and scales BF16 [E, K/g, N] permuted to match. The
        stacks may already be in this layout."""
        stacks = [each if CODES in each else to_marlin(each) for each in (gate_up, down)]
        return Experts(*(each[CODES] for each in stacks), *(each[SCALES] for each in stacks))

    @staticmethod
    def forward(
        x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, prepared: Experts
    ) -> torch.Tensor:
        experts = len(prepared.gate_up)
        nothing = _no_columns(experts, x.device)
        run = importlib.import_module(f"{MOE}.experts.marlin_moe").fused_marlin_moe
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

    @classmethod
    def warm(cls, scheme: Scheme, device: torch.device) -> bool:
        """vLLM's wheel has PTX of this kernel but no machine code for capability 9.0, so the driver compiles it, in up
        to 70 s on an H200, and caches the result (`~/.nv/ComputeCache`, CUDA_CACHE_PATH)."""
        assert scheme.group_size is not None
        experts, tokens, width = 8, 16, 4 * max(scheme.group_size, 64)
        groups = width // scheme.group_size
        codes = [(experts, width // 16, 2 * columns) for columns in (2 * width, width)]
        scales = [(experts, groups, columns) for columns in (2 * width, width)]
        prepared = Experts(
            *(torch.zeros(shape, dtype=torch.int32, device=device) for shape in codes),
            *(torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in scales),
        )
        x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device)
        ids = torch.arange(2 * tokens, dtype=torch.int32, device=device).view(tokens, 2) % experts
        cls.forward(x, torch.full((tokens, 2), 0.5, device=device), ids, prepared)
        torch.cuda.synchronize(device)
        return True


@cache
def _no_columns(experts: int, device: torch.device) -> torch.Tensor:
    """Return an empty tensor: Marlin's columns have no special order."""
    return torch.empty(experts, 0, dtype=torch.int32, device=device)


class _EightBitExperts(ExpertsKernel):
    """Base of the two 8-bit kernels. They read the wire tensors themselves."""

    @staticmethod
    def prepare(gate_up: Tensors, down: Tensors, operands: Operands) -> Experts:
        return Experts(
            *(t[leaf].contiguous() for leaf in ("weight", "weight_scale") for t in (gate_up, down))
        )

    @staticmethod
    def quantize(operands: Operands, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized: tuple[torch.Tensor, torch.Tensor]
        if operands == INT8_INT8:
            from vllm.model_executor.layers.quantization.utils.int8_utils import (
                per_token_quant_int8,
            )

            quantized = per_token_quant_int8(x.contiguous())
        else:
            from vllm import _custom_ops as ops

            quantized = ops.scaled_fp8_quant(x.contiguous(), use_per_token_if_dynamic=True)
        return quantized


class VllmTritonExperts(_EightBitExperts):
    """W8A8 and FP8 by vLLM's Triton kernel."""

    name = "vllm_triton_experts"
    operands = (INT8_INT8, FP8_FP8)
    device_type = "cuda"
    engine_classes = ("TritonExperts",)

    @classmethod
    def unavailable(cls, scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        return why_not_experts(scheme, device, shape, cls.engine_classes)

    @staticmethod
    def forward(
        x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, prepared: Experts
    ) -> torch.Tensor:
        config = importlib.import_module(f"{MOE}.config")
        scales = {"w1_scale": prepared.gate_up_scale, "w2_scale": prepared.down_scale}
        if prepared.gate_up.dtype == torch.int8:
            quant_config = config.int8_w8a8_moe_quant_config(
                **scales, a1_scale=None, a2_scale=None, per_act_token_quant=True
            )
        else:
            quant_config = config.fp8_w8a8_moe_quant_config(
                **scales, per_act_token_quant=True, per_out_ch_quant=True
            )
        y: torch.Tensor = importlib.import_module(f"{MOE}.fused_moe").fused_experts(
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
    operands = (FP8_FP8,)
    device_type = "cuda"
    engine_classes = ("TritonOrCutlassExperts", "CutlassExpertsFp8")
    least_pairs = 65
    row_invariant = True

    @classmethod
    def unavailable(cls, scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        why_not = why_not_experts(scheme, device, shape, cls.engine_classes)
        if why_not:
            return why_not
        if torch.cuda.get_device_capability(device) >= (10, 0):
            return "from capability 10.0 on vLLM's choice depends on the number of tokens"
        sizes = (shape.hidden, shape.intermediate)
        return (
            f"needs sizes in multiples of 16, not {list(sizes)}"
            if any(size % 16 for size in sizes)
            else None
        )

    @classmethod
    def forward(
        cls, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, prepared: Experts
    ) -> torch.Tensor:
        experts, hidden, intermediate = prepared.down.shape
        tokens = len(x)
        x, topk_weights, topk_ids = with_least_pairs(cls, x, topk_weights, topk_ids)
        rows = topk_ids.numel()
        values, scale = cls.quantize(FP8_FP8, x)
        output = torch.empty_like(x)
        by_hidden, by_intermediate, by_both = (
            _filled(experts, size, x.device) for size in (hidden, intermediate, 2 * intermediate)
        )
        importlib.import_module(f"{MOE}.experts.cutlass_moe").run_cutlass_moe_fp8(
            output=output,
            hidden_states=values,
            w1=prepared.gate_up,
            w2=prepared.down,
            topk_ids=topk_ids,
            activation=silu(),
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
        return output[:tokens]


@cache
def _filled(experts: int, value: int, device: torch.device) -> torch.Tensor:
    """Return int64 [E] filled with `value`, the stride that CUTLASS reads for each expert."""
    return torch.full((experts,), value, dtype=torch.int64, device=device)
