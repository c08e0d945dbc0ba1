"""Computes the sizes of a model from its config: shapes, numbers of weights and bytes. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Shape = tuple[int, int]


CUDA_MODEL = "model on cuda"
"""Level `model` on a GPU, where the trainer runs other operators (`qarl.align.cuda`). For dense models only."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a Llama-like or Qwen3-MoE model, as in its config. `sparse_layers`: indices of layers with experts."""

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
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    sparse_layers: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Any) -> ModelSize:
        """Read a transformers config or the content of a config.json. Raise KeyError if it lacks a required number."""
        keys: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        heads = keys["num_attention_heads"]
        kind = keys.get("model_type", "")
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
            qkv_bias=kind in ("qwen2", "qwen2_moe") or attention_bias,
            o_bias=attention_bias,
            mlp_bias=bool(keys.get("mlp_bias")),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            experts=experts,
            experts_per_token=keys.get("num_experts_per_tok") or 0,
            moe_intermediate=keys.get("moe_intermediate_size") or 0,
            sparse_layers=sparse,
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
        norms = (2 * self.layers + 1) * self.hidden + (
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

    def activation_bytes_per_token(self, align: str, layer: int = 0) -> int:
        """Return the bytes that one block saves per token for the backward.

        `align`: an applied alignment level, or `CUDA_MODEL` for level `model` on a GPU. On a CPU, attention saves FP32
        tensors at level `model`, but only BF16 queries, keys and values at `exact`, without log-sum-exps
        (`qarl.align.cpu_attention`). An aligned norm saves its input and one scale per row. The FP32 copies and scores
        that the backward of one row holds are not counted.
        """
        if align == CUDA_MODEL:  # each operator saves its BF16 inputs, and a linear saves its input
            attention = (
                2 * (self.query_width + 2 * self.kv_width)
                + 2 * self.query_width
                + 8 * self.head_dim
            )
            attention += 2 * (self.query_width + self.kv_width) if self.qk_norm else 0
            return 8 * self.hidden + attention + 6 * self.intermediate
        fp32_attention = align == "model"
        aligned = align in ("model", "exact")
        norms = 2 * (6 if aligned else 8) * self.hidden + 8
        qkv = (4 if fp32_attention else 2) * (self.query_width + 2 * self.kv_width)
        output = (6 if fp32_attention else 2) * self.query_width + (
            0 if align == "exact" else 4 * self.heads
        )
        rotary = 8 * self.head_dim if fp32_attention else 0
        qk_norm = (2 if aligned else 6) * (self.query_width + self.kv_width) + 4 * (
            self.heads + self.kv_heads
        )
        qk_norm = qk_norm if self.qk_norm else 0
        mlp = self.expert_row_bytes if layer in self.sparse_layers else 8 * self.intermediate
        return norms + qkv + output + rotary + qk_norm + mlp


def _mlp(prefix: str, hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj": (intermediate, hidden),
        f"{prefix}up_proj": (intermediate, hidden),
        f"{prefix}down_proj": (hidden, intermediate),
    }


def prepared_bytes(scheme: str, kernel: str | None, group_size: int, shape: Shape) -> int:
    """Return the bytes of a weight's copy in the layout of `kernel`, or 0 if the kernel reads the published tensors."""
    n, k = shape
    if kernel == "vllm_cpu":  # the experts' kernel, which calls one for linears
        kernel = {"w4a16": "vllm_cpu_wna16", "w8a8": "vllm_cpu_int8", "fp8": "vllm_cpu_fp8"}[scheme]
    if kernel == "reference":
        return 2 * n * k if scheme == "w4a16" else 0
    if kernel == "dequantized":
        return 2 * n * k
    if kernel == "qarl_cpu_w4a8":
        return n * k + 4 * n * (k // group_size)
    if kernel in ("vllm_cpu_wna16", "vllm_machete", "vllm_marlin", "vllm_marlin_experts"):
        return n * k // 2 + 2 * n * (k // group_size)
    return {
        "vllm_cpu_int8": n * k + 4 * n,
        "torch_int8": n * k + 4 * n,
        "vllm_cpu_fp8": 4 * n * k + 4 * n,
    }.get(kernel or "", 0)
