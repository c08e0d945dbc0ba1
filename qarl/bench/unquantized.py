"""What transformers' part of a decoder layer costs on a GPU, by counting as `qarl bench costs` does.

    rest      norms, rotary embedding, residuals, and SwiGLU of a dense layer, which a trainer runs at every scheme
    experts   transformers' experts (`grouped_mm_experts_forward`), which a BF16 trainer runs

Bytes of products are left out, because a roofline has them. Attention itself is left out too: its intermediate results
stay on the chip. The tensors have no memory, so no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qarl.bench.costs.counting import Counting
from qarl.bench.terms import Cost
from qarl.checks.model_size import ModelSize
from qarl.kernels.device import AssumedGPU, assume

_PRODUCTS = ("_grouped_mm", "mm", "addmm", "bmm", "linear")
LINEARS = (1, 2)
"""Kernels of an unquantized linear: one in the forward, one for each of two gradients in the backward."""


class _Elementwise(Counting):
    """Counts bytes of everything but products."""

    def _count(self, name: str, operands: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        before = self.counts.moved
        super()._count(name, operands, results)
        if name in _PRODUCTS:
            self.counts.moved = before

    @property
    def cost(self) -> Cost:
        return Cost(self.counts.kernels, self.counts.moved, self.counts.copies + self.counts.syncs)


@contextmanager
def _counting() -> Iterator[_Elementwise]:
    mode = _Elementwise()
    with assume(AssumedGPU((9, 0), 132, mode.launched)), mode:
        yield mode


def rest_of_layer(size: ModelSize, tokens: int) -> tuple[Cost, Cost]:
    """Return the cost of forward and backward of what is neither a product nor attention nor experts."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, apply_rotary_pos_emb

    with torch.device("meta"):
        norms = [Qwen3MoeRMSNorm(size.hidden).bfloat16() for _ in range(2)]
        by_head = [Qwen3MoeRMSNorm(size.head_dim).bfloat16() for _ in range(2)] if size.qk_norm else []
    x, attention, mlp = (_rows(tokens, size.hidden) for _ in range(3))
    heads = [_rows(1, tokens, count, size.head_dim) for count in (size.heads, size.kv_heads)]
    angles = [_rows(1, tokens, size.head_dim).detach() for _ in range(2)]
    halves = [] if size.sparse_layers else [_rows(tokens, size.intermediate) for _ in range(2)]
    with _counting() as forward:
        outputs = [norms[0](x)]
        query, key = (norm(head) for norm, head in zip(by_head, heads, strict=True)) if by_head else heads
        outputs += apply_rotary_pos_emb(query, key, *angles, unsqueeze_dim=2)
        added = x + attention
        outputs += [norms[1](added), added + mlp]
        if halves:
            outputs.append(torch.nn.functional.silu(halves[0]) * halves[1])
    return forward.cost, _backward(outputs)


def transformers_experts(size: ModelSize, tokens: int) -> tuple[Cost, Cost]:
    """Return the cost of forward and backward of a layer's experts in BF16."""
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = transformers.Qwen3MoeConfig(
        hidden_size=size.hidden, moe_intermediate_size=size.moe_intermediate, num_experts=size.experts
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config).bfloat16()
        ids = torch.empty(tokens, size.experts_per_token, dtype=torch.int64)
    x, weights = _rows(tokens, size.hidden), _rows(tokens, size.experts_per_token)
    with _counting() as forward:
        y = experts(x, ids, weights)
    return forward.cost, _backward([y])


def _rows(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)


def _backward(outputs: list[Any]) -> Cost:
    gradients = [torch.empty_like(output) for output in outputs]
    with _counting() as counter:
        torch.autograd.backward(outputs, gradients)
    return counter.cost
