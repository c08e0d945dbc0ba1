"""Commands of the tutorials and how-to pages: they exist, and take the keys that the pages give them.

A run's command has to give a config, with `my_run.yaml` as docs/learn/own_model.md has it. Other commands have to name
in their help each key that a page uses. Commands with placeholders, such as NAME.yaml, are for a reader to fill in.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from checkout import ROOT

from qarl.__main__ import COMMANDS
from qarl.config import load_config
from qarl.config.demos import DEMOS

PAGES = sorted(path for shelf in ("learn", "do") for path in (ROOT / "docs" / shelf).glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:qarl |python -m qarl\.)(.*)")
PLACEHOLDER = re.compile(r"NAME|FILE|FOLDER|DIR|REV|key=value|\[|sort_digits|guessing_game|\.\.\.")
RUNS = ("train", "doctor", "diagnose")


def commands(page: Path) -> list[str]:
    """The words after `qarl` of each command in the code blocks of a page, without placeholders."""
    found = []
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language not in ("", "bash"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            match = COMMAND.match(line.partition(" #")[0].strip())
            if match and not PLACEHOLDER.search(match[1]):
                found.append(match[1])
    return found


CASES = sorted({command for page in PAGES for command in commands(page)})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the config of the tutorial."""
    page = (ROOT / "docs/learn/own_model.md").read_text(encoding="utf-8")
    (config,) = re.findall(r"^```yaml\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my_run.yaml").write_text(config, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@cache
def help_of(name: str, topic: str = "") -> str:
    module = import_module(COMMANDS[name][0])
    return str(module.describe([topic] if topic else []))


def test_the_pages_have_commands_of_every_kind() -> None:
    assert len(CASES) > 25
    assert {command.split()[0] for command in CASES} >= {"demo", "train", "doctor", "eval", "data"}


@pytest.mark.parametrize("command", CASES)
def test_a_command_takes_what_the_page_gives_it(command: str, folder: Path) -> None:
    name, *words = shlex.split(command)
    keys = [word for word in words if "=" in word]
    assert name in COMMANDS
    if name in RUNS:
        load_config([word for word in keys if not word.startswith("doctor.")])
        return
    if name == "demo":
        demos = [word for word in words if "=" not in word] or ["quickstart"]
        assert demos[0] in {*DEMOS, "examples"}
        load_config([f"config={DEMOS[demos[0]].config}", *keys])
        return
    if name == "data":
        tasks = {key: value for key, _, value in (word.partition("=") for word in keys)}
        assert tasks.pop("task") and {"size", "validation"} <= tasks.keys()
        return
    for key in (word.partition("=")[0] for word in keys):
        assert f"{key}=" in help_of(name), key
