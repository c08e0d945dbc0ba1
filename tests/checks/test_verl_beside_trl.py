"""verl 0.9.1 imports a class from TRL whenever TRL is installed; new releases of TRL lack it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from qarl.checks.verl_plugin import check_no_new_trl
from qarl.errors import UserError


@pytest.mark.parametrize(
    ("version", "module", "refused"), [("1.16.0", "grpo", True), ("1.12.0", "ppo", False), ("0.12.0", None, False)]
)
def test_a_trl_without_the_class_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, module: str | None, refused: bool
) -> None:
    package = tmp_path / "trl"
    (package / "experimental" / module if module else package).mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / f"trl-{version}.dist-info").mkdir()
    (tmp_path / f"trl-{version}.dist-info" / "METADATA").write_text(f"Name: trl\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.metadata.version("trl") == version
    if not refused:
        check_no_new_trl()
        return
    with pytest.raises(UserError, match=r"does not run beside TRL 1\.16\.0"):
        check_no_new_trl()


def test_without_trl_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_no_new_trl()
