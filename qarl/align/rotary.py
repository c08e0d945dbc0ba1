"""Rotary embeddings: whether trainer and engine turn a query alike, and how the trainer's is made to.

Both sides' own modules turn the same random queries. Three outcomes:

    equal    the trainer, given the engine's cosines and sines, has the engine's bits: levels `model` and `exact`
    near     transformers' own turn differs by rounding alone: level `linears`
    far      it differs by more, so a key of `rope_parameters` counts on one side only: below `model` such a run would
             train another model than the one that is sampled from
"""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qarl.kernels.cpu import rotary as vllm_rotary

_NEAR = 0.01
"""Relative error, in norm, that rounding explains: BF16 cosines and sines leave 0.003, another formula 0.05 to 1."""
_PROBES = 2048
"""Positions that are compared."""


@dataclass(frozen=True)
class RotaryMatch:
    """`equal` and `near`: see the module. `error`: relative, of transformers' own turn. `engine`: vLLM's class.
    `turns`: the engine's cosines and sines where the trainer can use them."""

    equal: bool
    near: bool
    error: float
    engine: str
    turns: tuple[torch.Tensor, torch.Tensor] | None


PLAIN = {
    "default": frozenset[str](),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}
"""Types that the tests hold to be equal, with all the keys that both sides read of them."""


def is_plain(config: Any) -> bool:
    """Whether both sides are known to compute the same embedding, so that vLLM (slow to import) is not needed."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    keys = PLAIN.get(str(parameters.pop("rope_type", "default")))
    neutral = parameters.pop("partial_rotary_factor", 1.0) == 1.0
    parameters.pop("rope_theta", None)
    stretched = getattr(config, "dual_chunk_attention_config", None) is not None
    return keys is not None and neutral and not stretched and set(parameters) <= keys


def match_rotary(config: Any) -> RotaryMatch:
    """For a transformers config of Llama, Qwen2 or Qwen3; no weights are needed.

    Raises:
        Exception: what vLLM or transformers raises for `rope_parameters` that it cannot use.
    """
    head_size = head_size_of(config)
    described = {
        "type": config.model_type,
        "head_size": head_size,
        "positions": config.max_position_embeddings,
        "rope": getattr(config, "rope_parameters", None),
        "dual": getattr(config, "dual_chunk_attention_config", None),
    }
    key = json.dumps(described, sort_keys=True, default=str)
    return _match(key, _Hidden(config))


class _Hidden:
    """Keeps a config out of the cache's key."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hidden)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=32)
def _match(key: str, hidden: _Hidden) -> RotaryMatch:
    config = hidden.config
    head_size = head_size_of(config)
    generator = torch.Generator().manual_seed(0)
    positions = torch.linspace(0, config.max_position_embeddings - 1, _PROBES).long().unique()
    query = torch.randn(len(positions), head_size, generator=generator).bfloat16()
    engine = vllm_rotary.engine_rotary(config, head_size)
    theirs = vllm_rotary.engine_turn(engine, positions, query)
    turns = vllm_rotary.cached_turns(engine)
    if turns is not None and turns[0].shape[-1] * 2 != head_size:
        turns = None
    equal = turns is not None and torch.equal(_turn(query, *(part[positions] for part in turns)).bfloat16(), theirs)
    own = _transformers_turn(config, positions, query)
    error = float("inf") if own is None else float((own - theirs.float()).norm() / theirs.float().norm())
    return RotaryMatch(equal, error < _NEAR, error, type(engine).__name__, turns if equal else None)


def head_size_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _turn(query: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """transformers' `apply_rotary_pos_emb`, in FP32: query [T, D], cosines and sines [T, D / 2]."""
    x = query.float()
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x * cosines.float().repeat(1, 2) + rotated * sines.float().repeat(1, 2)


def _transformers_turn(config: Any, positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor | None:
    """FP32 [T, D] as the model's own module turns it; None if its cosines do not fit the heads."""
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size, small.intermediate_size = 0, 1, 1
    small.layer_types, small.pad_token_id = [], None
    module = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16, trust_remote_code=False).model.rotary_emb
    # A row of positions, as the trainer gives them: `dynamic` and `longrope` look at the largest.
    cosines, sines = module(query, positions[None])
    if cosines.shape[-1] != query.shape[-1]:
        return None
    half = query.shape[-1] // 2
    return _turn(query, cosines[0, :, :half], sines[0, :, :half])


class EngineRotaryEmbedding(nn.Module):
    """[..] positions -> cosines and sines, BF16 [B, T, D] each, from the engine's own table."""

    turns: tuple[torch.Tensor, torch.Tensor]

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = (part[position_ids] for part in self.turns)
        return torch.cat((cosines, cosines), dim=-1), torch.cat((sines, sines), dim=-1)
