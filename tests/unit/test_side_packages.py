"""Packages in a folder of their own: found there, and refused with a command that installs them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from qarl import side_packages
from qarl.errors import UserError

MODULE = "qarl_test_only_side_package"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a Python environment without such packages."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_missing_package_is_refused_with_the_command_that_installs_it(environment: Path) -> None:
    with pytest.raises(UserError) as caught:
        side_packages.require(MODULE, needed_for="this test", then="qarl demo smollm2")
    assert f"this test needs {MODULE}" in str(caught.value)
    assert "2. qarl demo smollm2" in str(caught.value)
    words = shlex.split(side_packages.install_command())
    assert words[0] == sys.executable
    assert words[words.index("--target") + 1] == str(environment / "smollm2")
    assert Path(words[words.index("-r") + 1]).is_file()


def test_a_package_of_the_folder_is_found_and_the_environment_comes_first(
    environment: Path,
) -> None:
    folder = environment / "smollm2"
    folder.mkdir()
    (folder / f"{MODULE}.py").write_text("VALUE = 7\n")
    (folder / "json.py").write_text("raise AssertionError('shadows the standard library')\n")
    side_packages.require(MODULE, needed_for="this test")
    assert sys.path[-1] == str(folder)
    assert __import__(MODULE).VALUE == 7
    sys.modules.pop(MODULE)


def test_the_folder_is_not_searched_if_nothing_is_missing(environment: Path) -> None:
    (environment / "smollm2").mkdir()
    side_packages.require("json", "yaml", needed_for="this test")
    assert str(environment / "smollm2") not in sys.path
