"""The configuration of a run: keys with their types, bounds and defaults; reading YAML and the command line.

    from qarl.config import load_config

Imports neither torch, transformers, vLLM nor verl.
"""

from qarl.config.errors import ConfigError, Problem
from qarl.config.load import build_config, describe_keys, load_config, write_resolved
from qarl.config.schema import ActorConfig, Config, OptimConfig

__all__ = [
    "ActorConfig",
    "Config",
    "ConfigError",
    "OptimConfig",
    "Problem",
    "build_config",
    "describe_keys",
    "load_config",
    "write_resolved",
]
