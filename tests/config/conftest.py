"""An empty folder with a minimal config."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_problems import MINIMAL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory that holds minimal.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minimal.yaml").write_text(MINIMAL)
    return tmp_path
