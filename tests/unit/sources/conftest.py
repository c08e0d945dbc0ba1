"""The library reasoning-gym for the tests of data sources: a stand-in, or the real one where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qarl.data import reasoning_gym_reward

FAKE = Path(__file__).parents[2] / "support/fake_gym"


def _of_library(name: str) -> bool:
    return name.partition(".")[0] == "reasoning_gym"


@pytest.fixture
def fake_gym(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `import reasoning_gym` find the stand-in, in this process and in those that it starts."""
    real = {name: module for name, module in sys.modules.items() if _of_library(name)}
    for name in real:
        del sys.modules[name]
    elsewhere = [folder for folder in sys.path if not Path(folder, "reasoning_gym").is_dir()]
    monkeypatch.setattr(sys, "path", [*elsewhere, str(FAKE)])
    reasoning_gym_reward._dataset.cache_clear()
    yield
    reasoning_gym_reward._dataset.cache_clear()
    for name in [name for name in sys.modules if _of_library(name)]:
        del sys.modules[name]
    sys.modules.update(real)
