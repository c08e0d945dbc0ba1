"""verl's keys for router replay: whether the servers return the experts of each token, and whether the actor replays.

verl's agent loop carries the routing from the server to the actor. verl's FSDP engine ignores it, but QaRL's engine
uses it (`qarl.verl.plugin.routing`). Servers return the routing only if the actor replays it, because it is large: two
bytes per token, layer and chosen expert.
"""

from __future__ import annotations

from typing import Any

from qarl.align.router_replay import replays
from qarl.checks.model import applied_level
from qarl.checks.model_folder import hf_config_or_carried
from qarl.config import Config
from qarl.errors import UserError
from qarl.rollout.vllm_plugin import experts_of


def routing_keys(config: Config, on_cpu: bool) -> dict[str, Any]:
    """Return verl's key for router replay in the servers. `qarl.verl.engine_keys` has that of the actor."""
    return {"actor_rollout_ref.rollout.enable_rollout_routing_replay": _is_replayed(config, on_cpu)}


def _is_replayed(config: Config, on_cpu: bool) -> bool:
    try:
        hf_config, _ = hf_config_or_carried(config.model.path, config.model.trust_remote_code)
    except UserError:
        return False  # the checks of a run say what is wrong with the model
    if not experts_of(hf_config):
        return False
    level, _ = applied_level(config, hf_config, "cpu" if on_cpu else "cuda")
    return replays(config.rollout.router_replay, level)
