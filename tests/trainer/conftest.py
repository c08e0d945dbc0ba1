"""Fixtures of the tests of qarl/trainer."""

from __future__ import annotations

import pytest

from qarl.trainer import loop


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run starts without sampling its probe: an idle trainer has no prompts."""
    monkeypatch.setattr(loop, "probe", lambda trainer: "probe: fine")


@pytest.fixture
def git_takes_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `git status` that a file size limit ends would leave index.lock in the checkout, and git refuses afterwards."""
    monkeypatch.setenv("GIT_OPTIONAL_LOCKS", "0")
