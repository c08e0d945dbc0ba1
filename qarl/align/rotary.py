"""Compare the rotary embeddings of trainer and engine, and give the trainer the engine's cosines and sines.

vLLM's module and transformers' module rotate the same random queries. There are three outcomes:

    equal    with the engine's cosines and sines, the trainer's results equal the engine's bit for bit. Levels `model`
             and `exact` are available
    near     transformers' own rotation differs only by rounding. Only levels `off` and `linears` are available
    far      transformers' rotation differs by more, because only one side uses a key of `rope_parameters`. QaRL
             refuses such a config, because trainer and engine would compute different models
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qarl.families import family_of
from qarl.kernels.cpu import layer_ops as cpu_ops

Turns = tuple[Tensor, Tensor]
"""Cosines and sines of a rotary embedding."""
_NEAR = 0.01
"""Largest relative error, in norm, of rounding. BF16 cosines and sines cause 0.003, a different formula 0.05 to 1."""
_PROBES = 2048
"""Number of positions that are compared."""


@dataclass(frozen=True)
class RotaryMatch:
    """The result of `match_rotary`. The module's docstring explains `equal` and `near`.

    `error`: relative difference between transformers' and vLLM's rotated queries. `engine`: name of vLLM's class.
    `turns`: vLLM's cosines and sines if `equal`, otherwise None.
    """

    equal: bool
    near: bool
    error: float
    engine: str
    turns: Turns | None


PLAIN = {
    "default": frozenset[str](),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
}
"""Types of rotary embedding that tests have shown to be equal on both sides -> all keys that both sides read."""


def is_plain(config: Any) -> bool:
    """Return whether tests have shown that both sides compute the same embedding for this config.

    Such a config needs no comparison, so vLLM (a slow import) is not imported.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    keys = PLAIN.get(str(parameters.pop("rope_type", "default")))
    neutral = parameters.pop("partial_rotary_factor", 1.0) == 1.0
    parameters.pop("rope_theta", None)
    stretched = getattr(config, "dual_chunk_attention_config", None) is not None
    return keys is not None and neutral and not stretched and set(parameters) <= keys


def match_rotary(config: Any) -> RotaryMatch:
    """Compare the rotary embeddings of both sides for a transformers config, without weights.

    Raises the exception of vLLM or transformers if it cannot use the config's `rope_parameters`.
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
    if key not in _MATCHES:
        _MATCHES[key] = _compare(config, head_size)
    return _MATCHES[key]


_MATCHES: dict[str, RotaryMatch] = {}
"""The results so far, because a run asks for the same result several times."""


def _compare(config: Any, head_size: int) -> RotaryMatch:
    generator = torch.Generator().manual_seed(0)
    last = config.max_position_embeddings - 1
    positions = torch.linspace(0, last, _PROBES).long().unique()
    query = torch.randn(len(positions), head_size, generator=generator).bfloat16()
    engine = cpu_ops.engine_rotary(config, head_size)
    by_engine = cpu_ops.engine_turn(engine, positions, query)
    turns = cpu_ops.cached_turns(engine)
    if turns is not None and not _equals(by_engine, query, turns, positions):
        turns = None
    by_transformers = _transformers_turn(config, positions, query)
    error = math.inf
    if by_transformers is not None:
        error = _relative_error(by_transformers, by_engine.float())
    name = type(engine).__name__
    return RotaryMatch(turns is not None, error < _NEAR, error, name, turns)


def _equals(by_engine: Tensor, query: Tensor, turns: Turns, positions: Tensor) -> bool:
    """Return whether the engine's result is `query` turned by its cosines and sines, bit for bit."""
    cosines, sines = turns
    if cosines.shape[-1] * 2 != query.shape[-1]:
        return False
    turned = _turn(query, cosines[positions], sines[positions])
    return torch.equal(turned.bfloat16(), by_engine)


def _relative_error(values: Tensor, reference: Tensor) -> float:
    return float((values - reference).norm() / reference.norm())


def head_size_of(config: Any) -> int:
    head_size = getattr(config, "head_dim", None)
    return int(head_size or config.hidden_size // config.num_attention_heads)


def _turn(query: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate `query` [T, D] in FP32, as transformers' `apply_rotary_pos_emb` does. Cosines and sines are [T, D / 2]."""
    x = query.float()
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x * cosines.float().repeat(1, 2) + rotated * sines.float().repeat(1, 2)


def _transformers_turn(config: Any, positions: Tensor, query: Tensor) -> Tensor | None:
    """Rotate `query` with transformers' own module. Return FP32 [T, D], or None if its cosines have a wrong size."""
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    small.num_hidden_layers = 0
    small.vocab_size = 1
    small.intermediate_size = 1
    small.layer_types = []
    small.pad_token_id = None
    model = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16, trust_remote_code=False)
    module = model.base_model.rotary_emb
    # One row with all positions, as in the trainer, because `dynamic` and `longrope` look at the largest position.
    cosines, sines = module(query, positions[None])
    width = cosines.shape[-1]
    family = family_of(config)
    if width != query.shape[-1] and not family.rotates_part:
        return None
    half = slice(0, width // 2)
    if (
        family.rotates_pairs
    ):  # each cosine comes twice; here it is taken once, and both sides rotate halves
        half = slice(0, width, 2)
    turned = _turn(query[:, :width], cosines[0, :, half], sines[0, :, half])
    return torch.cat((turned, query[:, width:].float()), dim=-1)


class EngineRotaryEmbedding(nn.Module):
    """Look up the cosines and sines of `position_ids` [B, T] in the engine's table. Return both as BF16 [B, T, D]."""

    turns: Turns

    def forward(self, x: Tensor, position_ids: Tensor, **kwargs: Any) -> Turns:
        cosines, sines = (part[position_ids] for part in self.turns)
        return torch.cat((cosines, cosines), dim=-1), torch.cat((sines, sines), dim=-1)
