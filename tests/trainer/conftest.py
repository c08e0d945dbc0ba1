"""Fixtures of the tests of qarl/trainer."""

from __future__ import annotations

import pytest

from qarl.trainer import loop


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run starts without sampling its probe: an idle trainer has no prompts."""
    monkeypatch.setattr(loop, "probe", lambda trainer: "probe: fine")
