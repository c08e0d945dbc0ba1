"""Fixtures of every test of the doctor."""

from __future__ import annotations

import pytest

from qarl.checks import memory


@pytest.fixture(autouse=True)
def roomy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much memory is free while the tests run is not the subject."""
    monkeypatch.setattr(memory, "available_memory", lambda: 64 * 2**30)
