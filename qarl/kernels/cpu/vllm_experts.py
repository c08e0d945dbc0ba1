"""vLLM's kernels for layers of experts on CPUs. The rollout engine runs the same operators.

    vllm_cpu        W4A16, W8A8, FP8: each expert's rows with the linear kernel that vLLM uses for dense layers on this
                    machine
    qarl_cpu        the same with QaRL's own linear kernels (`quant.kernels`) that multiply experts, if there are any
    vllm_cpu_bf16   BF16: vLLM's own operator

vLLM has no low-bit experts on CPUs without AMX. With AMX, its W4A16 experts would use int8 activations, and FP8
experts with a scale per channel are missing. So in the engine, QaRL's plugin for vLLM (`qarl.rollout.vllm_plugin`)
calls `CpuExperts`. It rounds a row to BF16 after each product, after silu(gate), and after silu(gate) * up. A
token's experts are weighted and summed in FP32, in the router's order, and rounded once. BF16 experts round only after
silu(gate) * up and at the end. A token's result does not depend on other tokens.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from qarl.kernels.base import ExpertsKernel, ExpertsShape, Layout, Tensors
from qarl.kernels.cpu import vllm_linears
from qarl.kernels.grouped import route, sizes_of
from qarl.kernels.linear_kernels import LINEAR_KERNELS, multiply_experts
from qarl.kernels.reference import quantize_int8, quantize_int8_cuda, silu_mul
from qarl.schemes.base import BF16_BF16, INT8_INT8, Operands, Scheme
from qarl.schemes.kernel_choice import KernelChoice

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
        weight = {name: tensor[expert] for name, tensor in self._tensors.items()}
        return self._kernel.prepare_gathered(weight)


class PreparedExperts(NamedTuple):
    gate_up: PreparedProduct
    down: PreparedProduct


class CpuExperts(ExpertsKernel):
    """Low-bit experts, computed one after another with vLLM's dense CPU kernels (`multiplies_experts`)."""

    name = "vllm_cpu"
    device_type = "cpu"
    row_invariant = True
    layout: ClassVar[Layout | None] = vllm_linears.TILES

    @classmethod
    def unavailable(cls, scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        if device.type != "cpu":
            return f"runs on cpu, not on {device.type}"
        if scheme.operands not in cls.all_operands():
            return f"does not support {scheme.name}"
        group = scheme.group_size
        if group is not None and group % 2:
            return f"needs an even group size, not {group}"
        gate_up = (2 * shape.intermediate, shape.hidden)
        down = (shape.hidden, shape.intermediate)
        linears = cls.linears_of(scheme.operands)
        for product in (gate_up, down):
            why_not = [kernel.unavailable(device, product) for kernel in linears]
            if None not in why_not:
                return "; ".join(str(reason) for reason in why_not)
        return None

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        return cls.linears_of(scheme.operands)[-1].prepared_bytes(scheme, shape)

    @classmethod
    def prepare(cls, gate_up: Tensors, down: Tensors, operands: Operands) -> PreparedExperts:
        """Convert every expert's weights to the layout of the linear kernel. The wire tensors are not kept."""
        linears = cls.linears_of(operands)
        return PreparedExperts(_prepared(gate_up, linears), _prepared(down, linears))

    @staticmethod
    def in_layout(prepared: PreparedExperts) -> tuple[Tensors, Tensors]:
        if prepared.gate_up.kernel.layout is None:
            return {}, {}
        gate_up = vllm_linears.stack_of(prepared.gate_up.experts)
        down = vllm_linears.stack_of(prepared.down.experts)
        return gate_up, down

    @classmethod
    def prepare_gathered(
        cls, gate_up: Tensors, down: Tensors, operands: Operands
    ) -> PreparedExperts:
        """Return weights that are prepared when they are used, for one forward."""
        linears = cls.linears_of(operands)
        products = ((_kernel_of(tensors, linears), tensors) for tensors in (gate_up, down))
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

    @classmethod
    def quantize(cls, operands: Operands, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if operands == INT8_INT8:
            tiles = torch.cpu._is_amx_tile_supported()
            return (quantize_int8_cuda if tiles else quantize_int8)(x)
        quantized: tuple[torch.Tensor, torch.Tensor]
        quantized = cls.linears_of(operands)[-1].quantize_input(x)
        return quantized

    @classmethod
    def all_operands(cls) -> tuple[Operands, ...]:
        each = dict.fromkeys(kernel.operands for kernel in LINEAR_KERNELS)
        return tuple(operands for operands in each if cls.linears_of(operands))

    @classmethod
    def linears_of(cls, operands: Operands) -> list[Any]:
        """Return the kernels of dense layers that multiply experts with these operands, in order of preference."""
        return [
            kernel
            for kernel in multiply_experts(operands)
            if not kernel.reference and set(kernel.options) & set(cls.options)
        ]


class CpuOwnExperts(CpuExperts):
    """The same with QaRL's own linear kernels, for trainer and engine."""

    name = "qarl_cpu"
    options = (KernelChoice.QARL,)
    layout = None  # its linears take codes as on the wire


def _prepared(tensors: Tensors, linears: list[Any]) -> PreparedProduct:
    kernel = _kernel_of(tensors, linears)
    if hasattr(kernel, "prepare_stack"):
        return PreparedProduct(kernel, kernel.prepare_stack(tensors))
    # A transport may use the memory of `tensors` again, and `prepare` may return what it got.
    each = (
        {name: tensor[expert].clone() for name, tensor in tensors.items()}
        for expert in range(sizes_of(tensors)[0])
    )
    return PreparedProduct(kernel, [kernel.prepare(expert) for expert in each])


def _kernel_of(tensors: Tensors, linears: list[Any]) -> Any:
    """Return the first of `linears` that multiplies by the experts' matrices in `tensors`."""
    if len(linears) == 1:
        return linears[0]
    scale = tensors["weight_scale"]
    codes = next(tensor for name, tensor in tensors.items() if name != "weight_scale")
    in_word = 8 if codes.dtype == torch.int32 else 1
    rows = scale.shape[1]
    shape = (rows, codes[0].numel() * in_word // rows)
    return next(kernel for kernel in linears if kernel.unavailable(scale.device, shape) is None)


def _weighted_sum(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """BF16 rows [T, k, H] times FP32 weights [T, k] -> BF16 [T, H]."""
    total = rows[:, 0].float().mul_(weights[:, 0, None])
    for i in range(1, rows.shape[1]):
        total.add_(rows[:, i].float().mul_(weights[:, i, None]))
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
    device_type = "cpu"
    row_invariant = True

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
    def prepare(gate_up: Tensors, down: Tensors, operands: Operands) -> PreparedBf16Experts:
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
