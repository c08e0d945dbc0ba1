"""vLLM's CUDA operators of a decoder layer, and for each a PyTorch function with the same rounding.

    rms_norm            `rms_norm`, or `fused_add_rms_norm` behind a residual addition
    silu_and_mul        `silu_and_mul`

The functions `*_reference` follow the contracts of `qarl.kernels.cuda.contracts`. They run on every device, and compute
the forward for tensors that are not on a GPU, so that the level can be tested without one.

The two norms sum squares in different orders. A decoder layer of transformers has added the residual already when it
calls its norm. vLLM's operator adds zeros to this sum then, which gives the bits that it gives for the two parts,
because it normalises their rounded sum.

Without compilation vLLM's engine runs these operators. Inductor would compile PyTorch's formulas, which round
differently, so the engine must not use it (`qarl.kernels.cuda.contracts.ENGINE_ARGUMENTS`).
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from qarl.process import configure_vllm_process, vllm_missing

OPERATORS = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding")


@cache
def unavailable() -> str | None:
    """Return why vLLM's operators cannot be called in this process, or None if they can. A GPU is not needed."""
    if missing := vllm_missing():
        return missing
    configure_vllm_process()
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C

    missing_ops = [name for name in OPERATORS if not hasattr(torch.ops._C, name)]
    return f"this vLLM build has no {', '.join(missing_ops)}" if missing_ops else None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, after_sum: bool) -> torch.Tensor:
    """Return the norm of x BF16 [..., K] with weight BF16 [K], as BF16.

    `after_sum`: whether x is the sum of a residual addition, which the engine computes in the norm's operator.
    """
    if not x.is_cuda:
        return rms_norm_reference(x, weight, epsilon)
    rows = x.reshape(-1, x.shape[-1])
    if after_sum:
        out = rows.clone()  # the operator writes into its operands
        torch.ops._C.fused_add_rms_norm(out, torch.zeros_like(rows), weight, epsilon)
    else:
        out = torch.empty_like(rows)
        torch.ops._C.rms_norm(out, rows.contiguous(), weight, epsilon)
    return out.view(x.shape)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Do the same as `rms_norm`, in PyTorch: the product of three FP32 numbers is rounded once."""
    total = x.float()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return (total * scale * weight.float()).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return norm and sum as vLLM's `fused_add_rms_norm` does. All tensors are BF16; x and residual are [..., K]."""
    total = x + residual
    return rms_norm_reference(total, weight, epsilon), total


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up as BF16, for gate and up BF16 [..., N]."""
    if not gate.is_cuda:
        return silu_and_mul_reference(gate, up)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    torch.ops._C.silu_and_mul(out, torch.cat((gate, up), dim=-1))
    return out


def silu_and_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Do the same as `silu_and_mul`, in PyTorch: both results are rounded."""
    return F.silu(gate.float()).to(gate.dtype) * up


def rotary_reference(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate x BF16 [T, heads, D] by cosines and sines BF16 [T, D / 2], as vLLM's `rotary_embedding` does."""
    first, second = x.float().chunk(2, dim=-1)
    cosines, sines = cosines.float()[:, None], sines.float()[:, None]
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(x.dtype)


def log_softmax_reference(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return FP32 log-probs [T] of `tokens` int64 [T] as vLLM's `compute_token_logprobs` does from BF16 logits [T, V].

    vLLM sums 1024 exponentials at a time.
    """
    scaled = logits.float() / temperature
    largest = scaled.amax(-1, keepdim=True)
    total = torch.zeros_like(largest)
    for block in (scaled - largest).exp().split(1024, dim=-1):
        total += block.sum(-1, keepdim=True)
    chosen = scaled.gather(-1, tokens[:, None])
    return (chosen - largest - total.log())[:, 0]
