"""The alignment level of a verl run, as the launcher knows it before any actor has started.

The actor applies the level when it builds its model (`qarl.verl.plugin.engine`). The launcher needs it earlier, for
the engine's arguments. It may run on a machine without a GPU; then it assumes compute capability 9.0, so on other GPUs
the engine has one split of attention for nothing. That costs speed, and the actor's level is right all the same.
"""

from __future__ import annotations

from typing import Any

from qarl.checks.model import applied_level, lower_level
from qarl.checks.model_folder import hf_config_or_carried
from qarl.config import Config
from qarl.errors import UserError
from qarl.quant.scheme import get_scheme
from qarl.rollout.engine_config import graph_arguments


def graphs(config: Config) -> dict[str, Any]:
    """Return vLLM's arguments for CUDA graphs: at the levels above `linears` those that the trainer can follow."""
    aligned = planned_level(config, on_cpu=False) in ("model", "exact")
    return graph_arguments(get_scheme(config.quant.scheme), aligned=aligned, kernels=config.quant.kernels)


def planned_level(config: Config, *, on_cpu: bool) -> str:
    """Return the level that will be applied, or `quant.align` if the model's config cannot be read."""
    hf_config = _hf_config(config)
    if hf_config is None:
        return config.quant.align
    return applied_level(config, hf_config, "cpu" if on_cpu else "cuda")[0]


def level_lines(config: Config) -> list[str]:
    """Return a note if the run would train at a lower level than `quant.align`. A missing model is noted elsewhere."""
    hf_config = _hf_config(config)
    lower = None if hf_config is None else lower_level(config, hf_config)
    return [f"note: {lower}"] if lower else []


def _hf_config(config: Config) -> Any:
    try:
        return hf_config_or_carried(config.model.path, config.model.trust_remote_code)[0]
    except UserError:  # the checks of a run say what is wrong with the model
        return None
