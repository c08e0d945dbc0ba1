"""The keys of QaRL's config that verl's actor worker needs, which verl's config carries to it in
`actor_rollout_ref.actor.fsdp_config.quant`. `qarl.verl.plugin.config.QuantSettings` takes types and defaults from here.
"""

from __future__ import annotations

from typing import Any

from qarl.config import Config
from qarl.config.schema import sections

_KEYS = (
    "quant.scheme",
    "quant.group_size",
    "quant.ignore",
    "quant.align",
    "quant.mismatch_limit",
    "rollout.router_replay",
    "rollout.tensor_model_parallel_size",
    "rollout.enforce_eager",
    "publish.delta",
    "model.head_dtype",
    "actor.old_log_probs",
    "actor.old_log_probs_sample",
)
ENGINE_KEYS = {key.replace(".", "_") if key == "publish.delta" else key.partition(".")[2]: key for key in _KEYS}
"""Name of a setting -> dotted key of QaRL's config."""


def engine_fields() -> dict[str, Any]:
    """Return the type and the default of each setting, as `pydantic.create_model` takes them."""
    fields: dict[str, Any] = {}
    for name, key in ENGINE_KEYS.items():
        section, _, leaf = key.partition(".")
        info = sections()[section].model_fields[leaf]
        fields[name] = (info.annotation, info)
    return fields | {"enforce_eager": (bool, False)}  # null is resolved before it gets there


def engine_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a run."""
    values = config.model_dump()
    settings = {name: values[key.partition(".")[0]][key.partition(".")[2]] for name, key in ENGINE_KEYS.items()}
    return settings | {"enforce_eager": bool(config.rollout.enforce_eager)}
