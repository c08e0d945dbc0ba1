"""The router of a mixture of experts at level `model` on NVIDIA GPUs, with its gradients in PyTorch.

    logits     QaRL's product (`qarl.kernels.triton.router`), which the engine runs too
    choice     vLLM's `topk_softmax`: a softmax over all logits in FP32, the k largest in descending order, divided by
               their sum if norm_topk_prob. The weights stay FP32, as in the engine; transformers rounds them to BF16

The engine's weights are the values of the forward. Their gradients are those of PyTorch's softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qarl.kernels.cuda import layer_ops


class CudaRouter(nn.Module):
    """BF16 [..., H] -> logits BF16 [T, E], weights FP32 [T, k] and experts int64 [T, k]."""

    weight: nn.Parameter
    hidden_dim: int
    top_k: int
    norm_topk_prob: bool

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits: Tensor = _Logits.apply(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        values, chosen = layer_ops.chosen_experts(
            logits.detach(), self.top_k, renormalize=self.norm_topk_prob
        )
        experts = chosen.long()
        weights = self.weigh(logits, experts, renormalize=self.norm_topk_prob)
        return logits, values + (weights - weights.detach()), experts

    @staticmethod
    def weigh(logits: Tensor, experts: Tensor, *, renormalize: bool) -> Tensor:
        """Return the weights FP32 [T, k] of `experts` [T, k], differentiable. A last bit may not be vLLM's."""
        chosen = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, experts)
        return chosen / chosen.sum(dim=-1, keepdim=True) if renormalize else chosen


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return layer_ops.router_logits(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grad_outputs
        need_x, need_weight = ctx.needs_input_grad
        return grad @ weight if need_x else None, grad.t() @ x if need_weight else None
