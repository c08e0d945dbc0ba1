"""A stand-in for the package reasoning-gym, with its interface and two tasks, for environments that lack it."""

from __future__ import annotations

from typing import Any

from reasoning_gym import utils
from reasoning_gym.factory import DATASETS

__all__ = ["create_dataset", "utils"]


def create_dataset(name: str, **values: Any) -> Any:
    kind, config_kind = DATASETS[name]
    config = config_kind(**values)
    config.validate()
    return kind(config)
