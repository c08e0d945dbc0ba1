"""vLLM's kernels for layers of experts. The rollout engine runs the same operators.

    vllm_cpu               W4A16, W8A8, FP8 on CPUs: each expert's rows with the linear kernel that vLLM uses for dense
                           layers on this machine
    vllm_cpu_bf16          BF16 on CPUs: vLLM's own operator
    vllm_marlin_experts    W4A16: `fused_marlin_moe`, as in MarlinExperts
    vllm_cutlass_experts   FP8 on capability 9.0: `run_cutlass_moe_fp8`, as in CutlassExpertsFp8
    vllm_triton_experts    W8A8; FP8 on capability 8.9: `fused_experts`, with the kernels and tiles of TritonExperts

vLLM 0.29 has no low-bit experts on CPUs without AMX. With AMX, its W4A16 experts would use int8 activations, and FP8
experts with a scale per channel are missing. So in the engine, QaRL's plugin for vLLM (`qarl.rollout.vllm_plugin`)
calls `CpuExperts`. It rounds a row to BF16 after each product, after silu(gate), and after silu(gate) * up. A
token's experts are weighted and summed in FP32, in the router's order, and rounded once. BF16 experts round only after
silu(gate) * up and at the end. A token's result does not depend on other tokens.

On a GPU, a kernel is used only if vLLM's `CompressedTensorsMoEMethod.get_moe_method` chooses the kernel's class for a
layer of the same sizes. The kernels call the functions behind the classes, with the arguments of vLLM 0.24.0 and
0.29.0. The classes themselves need the engine's workspace, which is sized for the engine's largest batch. Engine and
trainer can still differ in three ways:

- tensor or expert parallel rollouts have different tiles, and a sum over ranks
- engine arguments can override vLLM's choice of a class; QaRL does not set them
- Marlin's and Triton's tiles depend on the number of rows (vllm-project/vllm#46639)

vLLM 0.24 cannot run W8A8 experts, because its TritonExperts rejects int8 rows. `per_token_quant_int8` rounds halves
away from zero, unlike W8A8 linears.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from qarl.kernels.base import ExpertsKernel, ExpertsShape, Tensors, int4_bytes
from qarl.kernels.cpu import vllm_linears
from qarl.kernels.cpu.torch_linears import TorchFP8Linear
from qarl.kernels.cuda.vllm_linears import MOE, silu, uint4b8, why_not_experts
from qarl.kernels.experts import LOW_BIT, operands_of, route, sizes_of
from qarl.kernels.int4 import CODES, MARLIN, SCALES, to_marlin
from qarl.kernels.reference import quantize_fp8, quantize_int8, quantize_int8_cuda, silu_mul
from qarl.schemes.base import BF16_BF16, FP8_FP8, INT4_BF16, INT8_INT8, Operands, Scheme
from qarl.vllm_versions import moe_sum

_LINEARS: tuple[Any, ...] = (
    vllm_linears.VllmCpuWNA16Linear,
    vllm_linears.VllmCpuInt8TilesLinear,
    vllm_linears.VllmCpuInt8Linear,
    TorchFP8Linear,
)
"""The kernels of vLLM's dense layers on CPUs in order of preference."""
_BF16_ALIGNMENT = 32  # channels that vLLM's operator for BF16 experts takes at a time


class PreparedProduct(NamedTuple):
    """The linear kernel of one product, and each expert's weight as prepared by this kernel."""

    kernel: Any
    experts: Sequence[Any]


class _PreparedOnUse(Sequence[Any]):
    """Expert weights that are prepared each time they are read, so that one without tokens costs nothing."""

    def __init__(self, kernel: Any, tensors: Tensors) -> None:
        self._kernel = kernel
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors["weight_scale"])

    def __getitem__(self, expert: Any) -> Any:
        mine = {name: tensor[expert] for name, tensor in self._tensors.items()}
        return self._kernel.prepare_gathered(mine)


class PreparedExperts(NamedTuple):
    gate_up: PreparedProduct
    down: PreparedProduct


class CpuExperts(ExpertsKernel):
    """Low-bit experts, computed one after another with vLLM's dense CPU kernels."""

    name = "vllm_cpu"
    operands = LOW_BIT
    layout = vllm_linears.TILES

    @classmethod
    def unavailable(cls, scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        if device.type != "cpu":
            return f"runs on cpu, not on {device.type}"
        if scheme.operands not in cls.operands:
            return f"does not support {scheme.name}"
        group = scheme.group_size
        if group is not None and group % 2:
            return f"needs an even group size, not {group}"
        gate_up = (2 * shape.intermediate, shape.hidden)
        down = (shape.hidden, shape.intermediate)
        linears = _linears_of(scheme.operands)
        for product in (gate_up, down):
            why_not = [kernel.unavailable(device, product) for kernel in linears]
            if None not in why_not:
                return "; ".join(str(reason) for reason in why_not)
        return None

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        kernel = _linears_of(scheme.operands)[-1]
        bytes_of_weight: int = kernel.prepared_bytes(scheme, shape)
        return bytes_of_weight

    @staticmethod
    def prepare(gate_up: Tensors, down: Tensors) -> PreparedExperts:
        """Convert every expert's weights to the layout of the linear kernel. The wire tensors are not kept."""
        return PreparedExperts(_prepared(gate_up), _prepared(down))

    @staticmethod
    def in_layout(prepared: PreparedExperts) -> tuple[Tensors, Tensors]:
        if prepared.gate_up.kernel.layout is None:
            return {}, {}
        gate_up = vllm_linears.stack_of(prepared.gate_up.experts)
        down = vllm_linears.stack_of(prepared.down.experts)
        return gate_up, down

    @staticmethod
    def prepare_gathered(gate_up: Tensors, down: Tensors) -> PreparedExperts:
        """Return weights that are prepared when they are used, for one forward."""
        products = ((_kernel_of(tensors), tensors) for tensors in (gate_up, down))
        return PreparedExperts(
            *(PreparedProduct(kernel, _PreparedOnUse(kernel, wire)) for kernel, wire in products)
        )

    @staticmethod
    def forward(
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        prepared: PreparedExperts,
    ) -> torch.Tensor:
        gate_up, down = prepared
        routing = route(topk_ids, len(gate_up.experts))
        sorted_rows = x[routing.token]
        y = torch.empty_like(sorted_rows)
        start = 0
        for expert, end in enumerate(routing.ends.tolist()):
            if end > start:
                gate, up = gate_up.kernel.linear(
                    sorted_rows[start:end], gate_up.experts[expert], None
                ).chunk(2, dim=1)
                y[start:end] = down.kernel.linear(silu_mul(gate, up), down.experts[expert], None)
            start = end
        rows = torch.empty_like(y)
        rows[routing.order] = y
        return _weighted_sum(rows.view(*topk_ids.shape, -1), topk_weights)

    @staticmethod
    def quantize(operands: Operands, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if operands == FP8_FP8:
            return quantize_fp8(x)
        tiles = torch.cpu._is_amx_tile_supported()
        return (quantize_int8_cuda if tiles else quantize_int8)(x)


def _prepared(tensors: Tensors) -> PreparedProduct:
    kernel = _kernel_of(tensors)
    if hasattr(kernel, "prepare_stack"):
        return PreparedProduct(kernel, kernel.prepare_stack(tensors))
    each = (
        {name: tensor[expert] for name, tensor in tensors.items()}
        for expert in range(sizes_of(tensors)[0])
    )
    return PreparedProduct(kernel, [kernel.prepare(expert) for expert in each])


def _linears_of(operands: Operands) -> list[Any]:
    return [kernel for kernel in _LINEARS if kernel.operands == operands]


def _kernel_of(tensors: Tensors) -> Any:
    """Return the linear kernel that multiplies by the experts' matrices in `tensors`."""
    kernels = _linears_of(operands_of(tensors))
    if len(kernels) == 1:
        return kernels[0]
    scale = tensors["weight_scale"]
    shape = (scale.shape[1], tensors["weight"].shape[2])
    return next(kernel for kernel in kernels if kernel.unavailable(scale.device, shape) is None)


def _weighted_sum(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """BF16 rows [T, k, H] times FP32 weights [T, k] -> BF16 [T, H]."""
    total = rows[:, 0].float().mul_(weights[:, 0, None])
    for place in range(1, rows.shape[1]):
        total.add_(rows[:, place].float().mul_(weights[:, place, None]))
    return total.to(rows.dtype)


class PreparedBf16Experts(NamedTuple):
    """`gate_up` and `down`, packed as vLLM's operator reads them with the instruction set `isa` ("amx" or "vec")."""

    gate_up: torch.Tensor
    down: torch.Tensor
    isa: str


class VllmCpuBf16Experts(ExpertsKernel):
    """BF16 experts, computed by `cpu_fused_moe` as in vLLM's CPUUnquantizedExperts and X86CPUUnquantizedExperts."""

    name = "vllm_cpu_bf16"
    operands = (BF16_BF16,)

    @staticmethod
    def unavailable(scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        if device.type != "cpu":
            return f"runs on cpu, not on {device.type}"
        if shape.hidden % _BF16_ALIGNMENT:
            return f"needs a hidden size in multiples of {_BF16_ALIGNMENT}, not {shape.hidden}"
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return f"was checked only on x86, not on {platform.machine()}"
        return vllm_linears.cpu_ops_missing("cpu_fused_moe")

    @staticmethod
    def prepare(gate_up: Tensors, down: Tensors) -> PreparedBf16Experts:
        """Pack `gate_up`, BF16 [E, 2I, H], and `down`, BF16 [E, H, I], for the operator."""
        from vllm import _custom_ops as ops

        isa = vllm_linears.isa_hint()
        first = gate_up["weight"].detach()
        second = down["weight"].detach()
        missing = -second.shape[2] % _BF16_ALIGNMENT
        if missing:  # pad with columns of zeros, as the engine does
            gates = first.unflatten(1, (2, -1))
            first = F.pad(gates, (0, 0, 0, missing)).flatten(1, 2)
            second = F.pad(second, (0, missing))
        first, second = (
            ops.cpu_prepack_moe_weight(weight.contiguous(), isa) for weight in (first, second)
        )
        return PreparedBf16Experts(first, second, isa)

    @staticmethod
    def forward(
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        prepared: PreparedBf16Experts,
    ) -> torch.Tensor:
        """`topk_weights` and `topk_ids` must be contiguous."""
        from vllm import _custom_ops as ops

        gate_up, down, isa = prepared
        y: torch.Tensor = ops.cpu_fused_moe(
            x, gate_up, down, None, None, topk_weights, topk_ids, "silu", isa, False
        )
        return y


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

    @staticmethod
    def unavailable(scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        if os.environ.get("VLLM_MARLIN_INPUT_DTYPE"):
            return "VLLM_MARLIN_INPUT_DTYPE is set, so vLLM quantizes the activations"
        group_size = scheme.group_size
        why_not = why_not_experts(scheme, device, shape, ("MarlinExperts",))
        if why_not:
            return why_not
        if shape.intermediate % 64:
            return f"vLLM pads an intermediate size of {shape.intermediate} to a multiple of 64"
        if group_size is not None and (shape.intermediate <= group_size) != (
            shape.hidden <= group_size
        ):
            sizes = f"gate and up have {shape.hidden} columns and down has {shape.intermediate}"
            return f"{sizes}, but vLLM cannot mix one group per row with several groups per row"
        return None

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        return int4_bytes(scheme, shape)

    @staticmethod
    def prepare(gate_up: Tensors, down: Tensors) -> Experts:
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


@cache
def _no_columns(experts: int, device: torch.device) -> torch.Tensor:
    """Return an empty tensor: Marlin's columns have no special order."""
    return torch.empty(experts, 0, dtype=torch.int32, device=device)


class _EightBitExperts(ExpertsKernel):
    """Base of the two 8-bit kernels. They read the wire tensors themselves."""

    @staticmethod
    def prepare(gate_up: Tensors, down: Tensors) -> Experts:
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

    @staticmethod
    def unavailable(scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        return why_not_experts(scheme, device, shape, ("TritonExperts",))

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

    @staticmethod
    def unavailable(scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        classes = ("TritonOrCutlassExperts", "CutlassExpertsFp8")
        why_not = why_not_experts(scheme, device, shape, classes)
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
        return output


@cache
def _filled(experts: int, value: int, device: torch.device) -> torch.Tensor:
    """Return int64 [E] filled with `value`, the stride that CUTLASS reads for each expert."""
    return torch.full((experts,), value, dtype=torch.int64, device=device)
