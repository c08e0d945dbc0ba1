"""Chains of elementwise operations between products of a forward or backward, in FP32 and rounded once at the end.

On GPUs each is one Triton kernel (`qarl.kernels.triton.chains`), else PyTorch's operations, which are its reference.
Both round the same exact numbers, but for the last bits of exp. `turn` has no exp: products of two BF16 numbers are
exact in FP32, so its bits are the same, and they are those of vLLM's rotary embedding. No GPU has run these kernels.
"""

from __future__ import annotations

import torch

from qarl.kernels.grouped import has_triton


def silu_and_mul_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up from `grad`, that of silu(gate) * up. All are BF16 [..., N]."""
    if has_triton(grad.device):
        from qarl.kernels.triton import chains

        return chains.silu_and_mul_backward(grad, gate, up)
    dtype = gate.dtype
    grad, gate, up = (tensor.float() for tensor in (grad, gate, up))
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_up = grad * gate * sigmoid
    return grad_gate.to(dtype), grad_up.to(dtype)


def turn(
    x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, back: bool = False
) -> torch.Tensor:
    """Return the rotary embedding of x BF16 [B, T, heads, D], as BF16.

    `cosines`, `sines`: BF16 [B or 1, T, D], whose halves are equal. `back`: turn back, as the gradient needs it.
    """
    if has_triton(x.device):
        from qarl.kernels.triton import chains

        return chains.turn(x, cosines, sines, back=back)
    half = x.shape[-1] // 2
    cosine, sine = (part[..., None, :half].float() for part in (cosines, sines))
    if back:
        sine = -sine
    first, second = x.float().split(half, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(turned, dim=-1).to(x.dtype)


def log_softmax_backward(
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    tokens: torch.Tensor,
    grad: torch.Tensor,
    *,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient of `logits` [T, V] from `grad` FP32 [T], that of the log-probs of `tokens`, in their dtype.

    With y = logits / temperature it is grad * (1[token] - exp(y - log_sums)) / temperature. `log_sums`: FP32 [T], log
    of the sum of exp(y) of each row.
    """
    if has_triton(logits.device) and logits.dtype in (torch.bfloat16, torch.float32):
        from qarl.kernels.triton import chains

        return chains.log_softmax_backward(logits, log_sums, tokens, grad, temperature=temperature)
    gradient = (logits.float() / temperature - log_sums[:, None]).exp_().neg_()
    gradient[torch.arange(len(tokens), device=logits.device), tokens] += 1
    gradient *= grad[:, None] / temperature
    return gradient.to(logits.dtype)
