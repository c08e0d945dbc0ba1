"""Computes the sizes of a model from its config: shapes, numbers of weights and bytes. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from qarl.checks.block_arithmetic import BlockArithmetic
from qarl.families import family_named

Shape = tuple[int, int]


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a Llama-like model, as in its config. `sparse_layers`: indices of layers with experts."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_norms: int = 2
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    sparse_layers: tuple[int, ...] = ()
    plain_head: bool = True
    """Whether the logits are lm_head's product and nothing more (`qarl.families.base.Family.plain_head`)."""

    @classmethod
    def from_config(cls, config: Any) -> ModelSize:
        """Read a transformers config or the content of a config.json. Raise KeyError if it lacks a required number."""
        keys: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        heads = keys["num_attention_heads"]
        family = family_named(keys.get("model_type", ""))
        layers = keys["num_hidden_layers"]
        experts = keys.get("num_experts") or keys.get("num_local_experts") or 0
        every = keys.get("decoder_sparse_step") or 1
        dense = keys.get("mlp_only_layers") or ()
        sparse = tuple(
            i for i in range(layers) if experts and i not in dense and (i + 1) % every == 0
        )
        attention_bias = bool(keys.get("attention_bias"))
        return cls(
            layers=layers,
            hidden=keys["hidden_size"],
            intermediate=keys["intermediate_size"],
            heads=heads,
            kv_heads=keys.get("num_key_value_heads") or heads,
            head_dim=keys.get("head_dim") or keys["hidden_size"] // heads,
            vocab=keys["vocab_size"],
            tied=bool(keys.get("tie_word_embeddings")),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=bool(keys.get("mlp_bias")),
            qk_norm=family.head_norms,
            layer_norms=family.layer_norms,
            experts=experts,
            experts_per_token=keys.get("num_experts_per_tok") or 0,
            moe_intermediate=keys.get("moe_intermediate_size") or 0,
            sparse_layers=sparse,
            plain_head=family.plain_head,
        )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def block_linears(self, layer: int) -> dict[str, Shape]:
        """Return name -> [N, K] for all linears of a decoder block. Experts are included, the router is not."""
        prefix = f"model.layers.{layer}."
        attention = {"q_proj": self.query_width, "k_proj": self.kv_width, "v_proj": self.kv_width}
        linears = {f"{prefix}self_attn.{name}": (n, self.hidden) for name, n in attention.items()}
        linears[f"{prefix}self_attn.o_proj"] = (self.hidden, self.query_width)
        if layer not in self.sparse_layers:
            return linears | _mlp(f"{prefix}mlp.", self.hidden, self.intermediate)
        for expert in range(self.experts):
            linears |= _mlp(f"{prefix}mlp.experts.{expert}.", self.hidden, self.moe_intermediate)
        return linears

    @lru_cache(maxsize=8)  # noqa: B019  a frozen dataclass, of which a process has a few
    def linears(self) -> Mapping[str, Shape]:
        """[N, K] of every linear in all blocks. lm_head is not included."""
        return {
            name: shape
            for layer in range(self.layers)
            for name, shape in self.block_linears(layer).items()
        }

    @property
    def embedding_parameters(self) -> int:
        """Number of weights in the input and output embeddings. Tied embeddings count once."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def matrix_parameters(self) -> int:
        """Number of weights in the linears of all blocks, including experts and routers. Muon updates these weights."""
        routers = len(self.sparse_layers) * self.experts * self.hidden
        return sum(n * k for n, k in self.linears().values()) + routers

    @property
    def parameters(self) -> int:
        norms = (self.layer_norms * self.layers + 1) * self.hidden + (
            2 * self.head_dim * self.layers if self.qk_norm else 0
        )
        biases = self.layers * (
            (self.query_width + 2 * self.kv_width if self.qkv_bias else 0)
            + (self.hidden if self.o_bias else 0)
        )
        if self.mlp_bias:
            biases += (self.layers - len(self.sparse_layers)) * (
                2 * self.intermediate + self.hidden
            )
        return self.embedding_parameters + self.matrix_parameters + norms + biases

    @property
    def largest_parameter(self) -> int:
        """Number of weights in the largest single tensor: an embedding, a linear or a stack of experts."""
        linears = max(n * k for n, k in self.linears().values())
        stack = 2 * self.experts * self.moe_intermediate * self.hidden
        return max(self.vocab * self.hidden, linears, stack)

    @property
    def largest_block(self) -> int:
        """Number of weights in the linears of the largest block."""
        return max(
            sum(n * k for n, k in self.block_linears(i).values()) for i in range(self.layers)
        )

    def kv_bytes_per_token(self, tensor_parallel: int = 1) -> int:
        """Return the bytes of a token's BF16 keys and values on a GPU. Each GPU has at least one KV head per layer."""
        return 2 * 2 * self.layers * max(self.kv_heads // tensor_parallel, 1) * self.head_dim

    @property
    def expert_row_bytes(self) -> int:
        """Bytes that transformers' experts of one layer save for a token: x and the output of each of its experts
        (H each), gate and up (2I), silu(gate) and the input of down_proj (I each)."""
        return self.experts_per_token * (8 * self.moe_intermediate + 4 * self.hidden)

    def activation_bytes_per_token(self, saved: BlockArithmetic, layer: int = 0) -> int:
        """Return the bytes that one block saves per token for the backward. `saved`: what its operators save."""
        queries = self.query_width
        keys = self.kv_width
        norms = 2 * (saved.norm * self.hidden + saved.norm_scale)
        qkv = saved.qkv * (queries + 2 * keys)
        attention = saved.attention * queries + saved.log_sum_exp * self.heads
        rotary = saved.rotary * self.head_dim
        head_norms = 0
        if self.qk_norm:
            rows = self.heads + self.kv_heads
            head_norms = saved.head_norm * (queries + keys) + saved.norm_scale * rows
        mlp = saved.mlp * self.intermediate
        if layer in self.sparse_layers:
            mlp = self.expert_row_bytes
        return norms + qkv + attention + rotary + head_norms + mlp


def _mlp(prefix: str, hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj": (intermediate, hidden),
        f"{prefix}up_proj": (intermediate, hidden),
        f"{prefix}down_proj": (hidden, intermediate),
    }
