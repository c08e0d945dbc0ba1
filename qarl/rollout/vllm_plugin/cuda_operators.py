"""QaRL's operators for engines on a GPU, which level `model` asks for (`qarl.kernels.cuda.layer_ops.ENGINE_ARGUMENTS`).

    norms       `qarl.kernels.triton.norms`. vLLM's norms call `vllm.ir.ops.rms_norm` and `fused_add_rms_norm`, which
                choose among registered implementations by a list of priorities, an argument of each engine
    attention   `cuda_attention.py`, under the name CUSTOM of vLLM's registry of attention backends
    BF16        with `quant.align=exact`, cuBLAS does not split its sums (`qarl.kernels.cuda.whole_sums`)

All other engines run vLLM's own. vLLM infers the operators' schemas from the annotations below, so they are not texts.
"""

import torch
from torch import Tensor
from vllm import ir
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from qarl.errors import UserError
from qarl.kernels.cuda import whole_sums
from qarl.kernels.cuda.layer_ops import NORM_PROVIDER, NORMS
from qarl.kernels.triton import norm_widths

_ATTENTION = "qarl.rollout.vllm_plugin.cuda_attention.OneOrderBackend"
"""vLLM imports it when an engine asks for it."""


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """x BF16 [..., K] -> BF16 [..., K]. q and k are strided views of the product of q, k and v."""
    from qarl.kernels.triton import norms

    assert weight is not None
    return norms.rms_norm(x, weight, epsilon)


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """x and x_residual BF16 [..., K] -> the norm of their sum, and the sum, in their memory."""
    from qarl.kernels.triton import norms

    assert weight is not None
    return norms.add_rms_norm(x, x_residual, weight, epsilon, in_place=True)


def _takes(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Whether the kernel takes these arguments. For all others vLLM's operator stays."""
    return (
        variance_size is None
        and weight is not None
        and x.dtype == weight.dtype == torch.bfloat16
        and norm_widths.unavailable(x.shape[-1]) is None
    )


def _takes_with_residual(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return x_residual.shape == x.shape and _takes(x, weight, epsilon, variance_size)


def register() -> None:
    """Register norms and attention with vLLM, once in a process. Where a run asks for it, keep cuBLAS's sums whole."""
    whole_sums.apply()
    alone = ir.ops.rms_norm.register_impl(NORM_PROVIDER, supports_args=_takes)
    behind_sum = ir.ops.fused_add_rms_norm.register_impl(
        NORM_PROVIDER, supports_args=_takes_with_residual, inplace=True
    )
    alone(rms_norm)
    behind_sum(fused_add_rms_norm)
    register_backend(AttentionBackendEnum.CUSTOM, _ATTENTION)


def check_operators() -> None:
    """Raise UserError if an engine of level `model` in this process would run other norms or another attention."""
    for name in NORMS:
        priority = getattr(ir.ops, name).get_priority()
        if priority[:1] != [NORM_PROVIDER]:
            raise UserError(
                f"vLLM would run another {name} than the trainer",
                where=f"vLLM's ir_op_priority.{name}",
                why=f"it is {priority}, but at quant.align=model both run QaRL's ({NORM_PROVIDER})",
                fix="set nothing of ir_op_priority, or set quant.align=linears",
            )
    attention = AttentionBackendEnum.CUSTOM.get_path()
    if attention != _ATTENTION:
        raise UserError(
            "vLLM would run another attention than the trainer",
            where="vLLM's registry of attention backends, CUSTOM",
            why=f"another plugin has registered {attention}",
            fix="leave that plugin out of VLLM_PLUGINS, or set quant.align=linears",
        )
