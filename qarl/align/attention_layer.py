"""The attention of a decoder layer, with queries, keys and values by token until attention itself.

transformers' layer turns transposed queries and keys by a chain of operations, whose place no kernel can take. Here a
subclass for each device says how to turn them, and how to attend.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from qarl.align.packed_attention import Attended, unless_empty
from qarl.align.rotary import Turns


class AttentionLayer(nn.Module):
    """Attention of transformers' Llama, Qwen2 and Qwen3. Subclasses turn and attend.

    With a key-value cache, which no training has, this is transformers' forward."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    head_dim: int
    scaling: float
    attention_dropout: float
    sliding_window: int | None

    def turned(self, query: Tensor, key: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        """Return the rotary embeddings of query and key, BF16 [B, T, heads, D]."""
        raise NotImplementedError

    def attended(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Return attention, BF16 [B, T, heads, D], of queries, keys and values, BF16 [B, heads, T, D]."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Turns,
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Attended:
        if past_key_values is not None:
            kwargs |= {"attention_mask": attention_mask, "past_key_values": past_key_values}
            turns = in_fp32(position_embeddings)
            attend: Any = super().forward
            return attend(hidden_states, position_embeddings=turns, **kwargs)[0], None
        projections = (self.q_proj, self.k_proj, self.v_proj)
        projected = (project(hidden_states) for project in projections)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in projected)
        if hasattr(self, "q_norm"):
            query = self.q_norm(query)
            key = self.k_norm(key)
        query, key = self.turned(query, key, position_embeddings)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        kwargs["dropout"] = self.attention_dropout if self.training else 0.0
        if hasattr(self, "sliding_window"):
            kwargs["sliding_window"] = self.sliding_window
        attended = self.attended(query, key, value, unless_empty(attention_mask), **kwargs)
        output: Tensor = self.o_proj(attended.flatten(-2))
        return output, None


def in_fp32(turns: Turns) -> Turns:
    """Return cosines and sines in FP32, in which products of BF16 numbers are exact."""
    cosines, sines = turns
    return cosines.float(), sines.float()
