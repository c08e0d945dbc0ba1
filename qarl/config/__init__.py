"""The configuration of a run: its keys with types, bounds and defaults, and the code that reads YAML and arguments.

    from qarl.config import load_config

This package does not import torch, transformers, vLLM or verl.
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
