"""What a family of models says of itself: which levels it has, what its layers have, and which config keys it refuses.

Does not import torch, so that the memory plan can ask without loading it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LLAMA_LAYERS = {
    "cpu": "qarl.align.cpu:align_decoder_layers",
    "cuda": "qarl.align.cuda:align_layers",
}
"""Device type -> what aligns decoder layers with two RMSNorms, each before its sublayer, and SwiGLU."""
Allowed = Callable[[Any, Any], bool]
"""(value, config) -> whether trainer and engine compute the same with this value of a config key."""


class Refusal(NamedTuple):
    """A config key that is refused, unless its value has no effect.

    `harmless(value, config)` returns whether a value has no effect. `why`: the reason that the error shows.
    """

    harmless: Allowed
    why: str


@dataclass(frozen=True)
class Family:
    """A family of models, as transformers' `model_type` names it. The defaults are those of Llama.

    Families with levels `model` and `exact` say which config keys they `refuse`, because `qarl.align.model_config` has
    a verdict on every key. The other families say which values of their keys were `compared`, and all else is refused.
    """

    name: str
    aligned: bool = False
    """Whether levels `model` and `exact` exist."""
    layers: Mapping[str, str] = field(default_factory=lambda: LLAMA_LAYERS)
    """Device type -> "module:function" that gives the model's layers, norms and attention the engine's arithmetic there
    (`qarl.align.levels`). Levels `model` and `exact` exist on no other device."""
    activations: tuple[str, ...] = ("silu",)
    """Values of `hidden_act` that both sides compute alike on those devices."""
    linears_mismatch: float | None = None
    """Mean |δ| at level `linears` in W4A16, in nats per token, of a family that was compared only there."""
    plain_head: bool = False
    """Whether logits are lm_head's unchanged output. Other families cap or scale it, or nobody looked."""
    qkv_bias: bool = False
    """Whether q_proj, k_proj and v_proj have biases without a config key that says so."""
    head_norms: bool = False
    """Whether queries and keys are normalized."""
    layer_norms: int = 2
    """Number of norms of the hidden size in a decoder layer, for the memory plan."""
    experts: bool = False
    """Whether its models are mixtures of experts."""
    rotates_part: bool = False
    """Whether transformers' attention rotates only the first dimensions if there are fewer cosines."""
    rotates_pairs: bool = False
    """Whether neighbouring dimensions are rotated, and transformers' module repeats each cosine."""
    packs: bool = True
    """Whether transformers' AttentionInterface chooses the attention, so that it can be told the rows of a pack
    (`qarl.align.packed_attention`)."""
    adapters: bool = True
    """Whether vLLM's class is a `SupportsLoRA`."""
    refuses: Mapping[str, Refusal] = field(default_factory=dict)
    """Config key -> why it is refused, for an aligned family."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Config key that no older aligned family reads -> its verdict (`qarl.align.model_config`)."""
    compared: Mapping[str, Allowed] = field(default_factory=dict)
    """Config key -> which of its values both sides honour, for a family that was compared only at `linears`.
    benchmarks/results/family_keys_cpu.json has the measured rows."""
    vllm_files: tuple[str, ...] = ()
    """Files of vllm/model_executor/models with its class and the classes it is built of. Default: its name."""
    transformers_folder: str = ""
    """Its folder of transformers/models. Default: its name."""

    @property
    def trained(self) -> bool:
        """Whether trainer and engine were compared on a model of this family."""
        return self.aligned or self.linears_mismatch is not None

    def load_layers(self, device_type: str) -> Callable[..., dict[str, int]]:
        """Import and return the function of `layers` for this type of device."""
        module, _, name = self.layers[device_type].partition(":")
        loaded: Callable[..., dict[str, int]] = getattr(importlib.import_module(module), name)
        return loaded


def any_value(value: Any, config: Any) -> bool:
    return True


def unset(value: Any, config: Any) -> bool:
    return not value


def only(*values: Any) -> Allowed:
    return lambda value, config: value in values


def unset_or(*values: Any) -> Allowed:
    return lambda value, config: value is None or value in values


def is_positive(value: Any, config: Any) -> bool:
    return isinstance(value, int) and value > 0


def full_attention(value: Any, config: Any) -> bool:
    return not set(value or ()) - {"full_attention"}


def head_size_of_hidden(value: Any, config: Any) -> bool:
    return value is None or bool(value * config.num_attention_heads == config.hidden_size)
