"""Which values of a config's keys both sides were compared with, in the families of `MEASURED`.

There the rule refuses by default. A key must have the default of the family's config class, unless it is in `SIZES` or
no forward reads it, or the family's `compared` allows its value (`qarl.families.measured`). `python -m
benchmarks.proofs family_keys` measures the rows behind it. scripts/config_keys.py writes the list of the keys that vLLM
or transformers reads, `config_keys_read.json`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from qarl.errors import UserError
from qarl.families import MEASURED

TABLE = Path(__file__).with_name("config_keys_read.json")
SIZES = frozenset(
    [
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "vocab_size",
    ]
)
"""Keys whose value is the shape of a parameter on both sides, or a limit on positions."""

_ROPE_KEYS = frozenset(
    [
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "long_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "short_factor",
        "truncate",
        "type",
    ]
)
"""Keys of `rope_parameters` that both sides' embeddings read, so that the comparison of rotations sees them."""


@cache
def read_keys(family: str) -> frozenset[str]:
    """Return the keys that vLLM or transformers reads for `family`, without those inside `rope_parameters`.

    For a plugin's family, whose sources nobody has parsed, these are the keys that every family reads."""
    families = json.loads(TABLE.read_text())["families"]
    sides = (
        *families["llama"].values(),
        *families.get(family, {}).values(),
    )  # Llama's list has the files that all share
    return frozenset(
        key for side in sides for key in side if not key.startswith("rope_parameters.")
    )


def check_compared_keys(config: Any, unread: Collection[str]) -> None:
    """Raise UserError if a key of this family's config has a value that was never compared.

    `unread`: keys that no forward reads, or that the comparison of the rotary embeddings covers.
    """
    family = config.model_type
    if family not in MEASURED:
        return
    usual = type(config)()
    allowed = MEASURED[family].compared
    for key in sorted(read_keys(family) - SIZES - set(unread)):
        value = getattr(config, key, None)
        default = getattr(usual, key, None)
        if value == default or (default is None and value is False and key != "is_causal"):
            continue
        if key in ("is_causal", "is_decoder") and value is True:
            continue
        if key == "layer_types" and default is None and set(value or ()) == {"full_attention"}:
            continue
        if key not in allowed or not allowed[key](value, config):
            raise _never_compared(family, key, value, default)
    _check_rope_keys(config)


def _check_rope_keys(config: Any) -> None:
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    factor = getattr(config, "partial_rotary_factor", None)
    if factor not in (None, 1.0, parameters.get("partial_rotary_factor")):
        raise _never_compared(config.model_type, "partial_rotary_factor", factor, None)
    if by_layer(parameters):
        for name, part in parameters.items():
            if part is None or (name, part) == ("rope_type", "default"):  # transformers adds them
                continue
            part = part if isinstance(part, Mapping) else {name: part}
            plain = part.get("rope_type", "default") in ("default", "linear")
            if not plain or set(part) - {"rope_type", "rope_theta", "factor"}:
                raise _never_compared(config.model_type, f"rope_parameters.{name}", part, "default")
        return
    for key in parameters:
        if key not in _ROPE_KEYS:
            raise _never_compared(
                config.model_type, f"rope_parameters.{key}", parameters[key], None
            )


def by_layer(parameters: Mapping[str, Any]) -> bool:
    """Return whether `rope_parameters` has one entry for each type of layer, as Gemma 3's."""
    return any(
        isinstance(part, Mapping)
        for name, part in parameters.items()
        if name.endswith("_attention")
    )


def _never_compared(family: str, key: str, value: Any, default: Any) -> UserError:
    why = f"trainer and rollout engine were compared only with {key}={default!r}; with another value they may "
    return refused_value(family, key, value, f"{why}compute different models")


def refused_value(family: str, key: str, value: Any, why: str) -> UserError:
    """Return the error for a key of a family's config that has a value with an effect on one side only."""
    return UserError(
        f"{key}={value!r} in a config of {family} is refused",
        where="model.path: config.json",
        why=why,
        fix="train a model whose config does not have this setting; deleting it from config.json would change "
        "what the model computes",
    )
