"""Kernels, copies and synchronisations of a micro-batch at level `model` on a GPU, counted without one.

The policy's own forward, log-probs and backward run at a model's real sizes on tensors without memory
(`benchmarks.proofs.counting`), once with one decoder layer and once with two. The difference is a layer; what is left
of the first is the rest: layout, embedding, last norm, lm_head and log-probs. vLLM's operators, which exist on GPUs
only, report a launch.

`benchmarks.proofs.costs` counts the weights' side of a step: quantizing, gathering, optimizer and publish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.proofs.counting import Counting, counting
from benchmarks.proofs.harness import Record, Row
from qarl.align.cuda import align_layers
from qarl.config.level import Level
from qarl.kernels.cuda import layer_ops
from qarl.quant.experts import QuantExperts
from qarl.quant.linear import QuantLinear
from qarl.quant.meta_model import meta_model
from qarl.rollout.requests import RolloutBatch
from qarl.schemes import UNQUANTIZED, Scheme, get_scheme
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.policy import Policy

ROWS = 8
PROMPT = 100
RESPONSE = 400
POSITIONS = 4096
"""Positions in the table of the rotary embedding."""
GROUP = 128
SIZES: dict[str, Row] = {
    "dense": {"hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8},
    "experts": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_key_value_heads": 4,
    },
}
"""Qwen3-8B's layers, and Qwen3-30B-A3B's."""
SHARED: Row = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def step_counts(record: Record, *, scheme: str = "w4a16") -> None:
    """Count forward and backward of a layer, and of the rest. No micro-batch may make the host wait."""
    for kind in SIZES:
        names = [
            f"{kind} | {part} | {what}"
            for part in ("forward", "backward")
            for what in ("a layer", "the rest")
        ]
        if not any(map(record.wants, names)):
            continue
        one = passes(kind, 1, scheme)
        two = passes(kind, 2, scheme)
        rows = [row for pair in zip(one, two, strict=True) for row in divided(*pair)]
        for name, row in zip(names, rows, strict=True):
            record.add(name, row, ok=row["syncs"] == 0)


def divided(one: Counting, two: Counting) -> tuple[Row, Row]:
    """Return the counts of a layer, and of what is left of `one`, a model with a single layer."""
    layer = Counter(two.names)
    layer.subtract(one.names)
    rest = Counter(one.names)
    rest.subtract(layer)
    counts = asdict(one.counts)
    of_layer = {name: value - counts[name] for name, value in asdict(two.counts).items()}
    of_rest = {name: counts[name] - value for name, value in of_layer.items()}
    return named(of_layer, layer), named(of_rest, rest)


def named(counts: Row, names: Counter[str]) -> Row:
    return counts | {"kernels_by_name": {name: number for name, number in names.items() if number}}


def passes(kind: str, layers: int, scheme: str) -> tuple[Counting, Counting]:
    """Return the counts of a forward and its backward, of `ROWS` packed rows."""
    layer_ops._pack.cache_clear()  # as in a micro-batch of other lengths than the last
    engine = Engine()
    with patch.multiple(layer_ops, **engine.operators()):
        with counting():
            policy = policy_of(kind, layers, get_scheme(scheme, group_size=GROUP))
        batch = batch_of().to(torch.device("meta"))
        with counting() as forward:
            engine.counter = forward
            log_probs = policy.response_log_probs(batch, slice(0, ROWS), temperature=1.0)
        with counting() as backward:
            log_probs.backward(torch.empty_like(log_probs))
    return forward, backward


def policy_of(kind: str, layers: int, scheme: Scheme) -> Policy:
    """Return a policy on the meta device, with the kernels and operators of a GPU."""
    model: Any = meta_model(config_of(kind, layers))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            linear = QuantLinear(module, scheme, qualified_name=name, kernel="triton")
            model.set_submodule(name, linear)
        elif name.endswith(".experts"):
            kernel = "triton_batch_invariant"
            experts = QuantExperts(module, scheme, qualified_name=name, kernel=kernel)
            model.set_submodule(name, experts)
    for module in model.modules():
        if isinstance(module, QuantLinear | QuantExperts):
            module.make_ready()
    policy = Policy(model, UNQUANTIZED, (), align=Level.OFF)
    align_layers(model)
    table = torch.empty(POSITIONS, model.config.head_dim // 2, dtype=torch.bfloat16, device="meta")
    model.model.rotary_emb.turns = (table, table.clone())
    model.train()
    return policy


def config_of(kind: str, layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3MoeConfig

    keys = SHARED | SIZES[kind] | {"num_hidden_layers": layers}
    return Qwen3MoeConfig(**keys) if "num_experts" in keys else Qwen3Config(**keys)


def batch_of() -> Batch:
    rollout = RolloutBatch(
        prompt_token_ids=[[1] * PROMPT] * ROWS,
        response_token_ids=[[2] * RESPONSE] * ROWS,
        rollout_log_probs=[[-1.0] * RESPONSE] * ROWS,
        finish_reasons=["stop"] * ROWS,
        weight_version=0,
    )
    return make_batch(rollout, torch.zeros(ROWS), torch.zeros(ROWS), pad_token_id=0)


class Engine:
    """Stands for vLLM's operators on a GPU: each copies what QaRL copies for it, and reports its launch."""

    counter: Counting

    def operators(self) -> Row:
        return {
            "silu_and_mul": self.silu_and_mul,
            "chosen_experts": self.chosen_experts,
            "flash_attention": self.flash_attention,
        }

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        both = torch.cat((gate, up), dim=-1)
        self.counter.launched("silu_and_mul", [both, out])
        return out

    def chosen_experts(
        self, logits: Tensor, top_k: int, *, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        weights = logits.new_empty(len(logits), top_k, dtype=torch.float32)
        experts = torch.empty_like(weights, dtype=torch.int32)
        self.counter.launched("topk_softmax", [logits, weights, experts])
        return weights, experts

    def flash_attention(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        pack = layer_ops._pack(tuple(lengths), query.device)
        pages = [layer_ops.into_pages(each, pack.slots, pack.pages) for each in (key, value)]
        out = torch.empty_like(query)
        log_sums = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
        self.counter.launched("flash_attention_3", [query, *pages, out, log_sums])
        return out, log_sums
