"""What the plugin's low-bit experts share on CPUs and GPUs: their scheme, their parameters, and what they refuse.

The parameters have the names and shapes of vLLM's own: `w13_*` [E, 2I, ...], gate before up, and `w2_*` [E, H, ...], in
checkpoint format. vLLM's loader splits a parameter according to the attributes `is_transposed` and, for scales,
`quant_method` ("group", "channel").

These internals of vLLM are used, which both supported releases have:

    CompressedTensorsConfig.get_scheme_dict(layer, name), _add_fused_moe_to_target_scheme_map()
        vLLM's CompressedTensorsMoEMethod.get_moe_method calls these to find the scheme of a layer's experts
    RoutedExperts
        the module of a layer's experts (`mlp.experts.routed_experts`): `activation`, `apply_router_weight_on_input`
    FusedMoEMethodBase
        `moe`: the sizes of the layer, and how it is spread over GPUs
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, MoEActivation
from vllm.model_executor.utils import set_weight_attrs

from qarl.errors import UserError
from qarl.kernels.base import ExpertsShape, Tensors
from qarl.kernels.registry import presumed_experts_kernel
from qarl.quant.wire_specs import wire_specs
from qarl.rollout.kernel_request import KernelRequest
from qarl.rollout.publish.experts import STORED
from qarl.schemes import QuantArgs, Scheme, engine_scheme_names, get_scheme
from qarl.schemes.kernel_choice import KernelChoice

_SHAPE = "weight_shape"
"""A wire tensor of every matrix that no stack has."""


class LowBitWeights(FusedMoEMethodBase):
    """The weights of one layer's experts, quantized with `scheme`, for the kernel that
    trainer and engine prefer. A subclass multiplies."""

    device_type: str

    def __init__(self, moe: Any, scheme: Scheme, request: KernelRequest | None = None) -> None:
        """`request`: what the engine was asked for, or None if it uses its own kernels. Raise UserError if no kernel
        of experts is for it."""
        super().__init__(moe)
        self.scheme = scheme
        self.request = request
        kernels = request.kernels if request else KernelChoice.ENGINE
        kernel = presumed_experts_kernel(scheme.operands, kernels, self.device_type)
        if kernel is None:
            raise UserError(
                f"QaRL has no own kernel for {scheme.name} experts",
                where=f"quant.kernels={kernels}",
                fix="set quant.kernels=engine",
            )
        self.kernel = kernel
        self.group_size = scheme.group_size
        group = self.group_size or 1
        self.names = tuple(name for name in scheme.wire_specs(1, group) if name != _SHAPE)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register empty parameters. Raise UserError if the kernel cannot multiply experts of these sizes."""
        shape = ExpertsShape(
            num_experts, self.moe.experts_per_token, hidden_size, intermediate_size_per_partition
        )
        self._check(layer, shape)
        sizes = ((2 * shape.intermediate, hidden_size), (hidden_size, shape.intermediate))
        assert self.scheme.weights is not None
        kind = self.scheme.weights.strategy
        for stack, (rows, columns) in zip(STORED.values(), sizes, strict=True):
            wire = wire_specs(self.scheme, rows, columns)
            for name in self.names:
                dtype, size = wire[name]
                parameter = nn.Parameter(
                    torch.empty(num_experts, *size, dtype=dtype), requires_grad=False
                )
                layer.register_parameter(f"{stack}_{name}", parameter)
                set_weight_attrs(
                    parameter, {**extra_weight_attrs, "quant_method": kind, "is_transposed": False}
                )
            if _SHAPE in wire:
                # `weight_shape` arrives twice per expert of w13. vLLM's reload would count the second as a new weight.
                unused = nn.Parameter(torch.empty(0, dtype=torch.int64), requires_grad=False)
                layer.register_parameter(f"{stack}_{_SHAPE}", unused)
                set_weight_attrs(unused, {"weight_loader": _ignore_weight})

    def _check(self, layer: Any, shape: ExpertsShape) -> None:
        why_not = self.kernel.unavailable(self.scheme, torch.device(self.device_type), shape)
        if (
            layer.activation != MoEActivation.SILU
            or layer.apply_router_weight_on_input
            or self.moe.has_bias
        ):
            why_not = (
                "the kernel supports only SiLU experts without biases and without router weights on the input; "
                f"this layer has the activation {layer.activation}"
            )
        if self.moe.moe_parallel_config.use_ep:
            why_not = "expert parallelism is not supported, because each worker needs all experts of a layer"
        if self.group_size is not None and shape.intermediate % self.group_size:
            columns = f"{shape.intermediate} columns of down_proj"
            why_not = f"{columns} are not a multiple of the group size {self.group_size}"
        if why_not is not None:
            devices = "a CPU" if self.device_type == "cpu" else "a GPU"
            raise UserError(
                f"no kernel supports these {self.scheme.name} experts on {devices}",
                where=f"{layer.layer_name}: {shape}",
                why=why_not,
                fix="choose a different quant.scheme, or add the experts to quant.ignore",
            )

    def loaded(self, layer: Any) -> list[Tensors]:
        """Return the loaded wire tensors of both stacks, gate_up and down."""
        return [
            {name: getattr(layer, f"{stack}_{name}").data for name in self.names}
            for stack in STORED.values()
        ]


def _ignore_weight(
    param: nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """Ignore a loaded `weight_shape`, because the shape is known from the config."""
    return True if return_success else None


def scheme_of_experts(
    config: Any, layer: Any, prefix: str, request: KernelRequest | None
) -> Scheme | None:
    """Return the QaRL scheme that a layer's experts have in `config`, a CompressedTensorsConfig, or None. `request`:
    what the engine was asked for."""
    config._add_fused_moe_to_target_scheme_map()
    names = (f"{prefix}.0.{matrix}" for matrix in ("gate_proj", "up_proj", "down_proj"))
    first, *others = (config.get_scheme_dict(layer, name) for name in names)
    if first is None or any(other != first for other in others):
        return None
    return scheme_of_weights(first, request)


def scheme_of_weights(
    operand_args: Mapping[str, Any], request: KernelRequest | None = None
) -> Scheme | None:
    """Return the QaRL scheme that a compressed-tensors layer uses, or None for other schemes.

    A `request` names its scheme, which may have the number formats of another one in vLLM's reading."""
    try:
        operands = [
            None
            if operand_args.get(part) is None
            else QuantArgs.from_compressed_tensors(operand_args[part])
            for part in ("weights", "input_activations")
        ]
    except ValueError:  # no scheme of QaRL has these settings
        return None
    group_size = (operands[0] and operands[0].group_size) or 128
    names = (request.scheme,) if request else engine_scheme_names(quantized=True)
    schemes = (get_scheme(name, group_size) for name in names)
    return next(
        (
            candidate
            for candidate in schemes
            if [candidate.weights, candidate.input_activations] == operands
        ),
        None,
    )
