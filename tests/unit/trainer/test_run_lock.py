"""One process at a time works in a run folder, from the start of its command to its end."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_state import interrupted_run
from engine_helpers import config

import qarl.checks.model_folder
from qarl.config import Config
from qarl.errors import UserError
from qarl.train import main
from qarl.trainer.resume import open_run
from qarl.trainer.run_lock import check_free, lock_run

pytestmark = pytest.mark.usefixtures("in_the_checkout")
FORK = multiprocessing.get_context("fork")  # importing PyTorch again would take seconds


class Holder:
    """A process that runs `work` and has set `begun` once it holds the lock."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        self.begun = FORK.Event()
        self.process = FORK.Process(target=work, args=(self.begun, *arguments))

    def __enter__(self) -> int:
        self.process.start()
        assert self.begun.wait(60)
        return self.process.pid or 0

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.join()


def start(begun: Any, arguments: list[str]) -> None:
    """Start `qarl train`, and stay in its first work."""
    qarl.checks.model_folder.check_files = lambda config: (begun.set(), signal.pause())
    main(arguments)


def hold(begun: Any, run_dir: Path) -> None:
    with lock_run(run_dir):
        begun.set()
        signal.pause()


def hold_beside_a_child(begun: Any, run_dir: Path, children: Any) -> None:
    with lock_run(run_dir):
        child = FORK.Process(target=signal.pause)
        child.start()
        children.put(child.pid)
        begun.set()
        signal.pause()


def arguments_of(settings: Config, backend: str) -> list[str]:
    return [
        "config=configs/quickstart.yaml",
        f"output_dir={settings.output_dir}",
        f"name={settings.name}",
        f"backend={backend}",
    ]


@pytest.mark.parametrize("backend", ["local", "verl"])
@pytest.mark.parametrize("earlier", [True, False], ids=["earlier run", "new folder"])
def test_the_second_of_two_starts_ends_before_any_work(
    tmp_path, monkeypatch, capsys, backend, earlier
):
    settings = config(tmp_path)
    if earlier:
        interrupted_run(settings)
    arguments = arguments_of(settings, backend)
    with Holder(start, arguments) as pid:

        def work(config: Config) -> None:
            raise AssertionError("the second start began its work")

        monkeypatch.setattr(qarl.checks.model_folder, "check_files", work)
        assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and "Traceback" not in error
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert f"process {pid} of host {socket.gethostname()}" in error and f"since {today}" in error
    assert "choose a different name=" in error


def test_a_dead_process_holds_no_lock_even_if_a_child_of_it_lives(tmp_path):
    children = FORK.Queue()
    with Holder(hold_beside_a_child, tmp_path, children) as pid:
        child = children.get(timeout=60)
        with pytest.raises(UserError, match="another process") as caught, lock_run(tmp_path):
            raise AssertionError("not reached")
        assert f"process {pid} " in str(caught.value)
    try:
        os.kill(child, 0)
        with lock_run(tmp_path) as locked:
            assert locked
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "left",
    [
        json.dumps({"pid": 1, "host": "elsewhere", "since": "2020-01-01 00:00:00 UTC"}),
        "",
        "{",
        "[]",
    ],
)
def test_a_file_that_another_process_has_left_is_no_lock(tmp_path, left):
    (tmp_path / ".lock").write_text(left)
    check_free(tmp_path)
    with lock_run(tmp_path) as locked:
        assert locked
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_holder_that_has_no_name_is_refused_too(tmp_path):
    with Holder(hold, tmp_path):
        (tmp_path / ".lock").write_text("torn")
        for opened in (lambda: check_free(tmp_path), lock_run(tmp_path).__enter__):
            with pytest.raises(UserError, match="another process") as caught:
                opened()
            assert "process ? of host ?" in str(caught.value)


def test_the_lock_follows_when_an_earlier_run_is_moved_aside(tmp_path):
    settings = config(tmp_path, "trainer.resume_mode=disable")
    interrupted_run(settings)
    with lock_run(settings.run_dir), open_run(settings):
        assert settings.run_dir.with_name(f"{settings.name}.1").is_dir()
        with pytest.raises(UserError, match="another process"):
            check_free(settings.run_dir)
    check_free(settings.run_dir)


@pytest.mark.parametrize("backend", ["local", "verl"])
def test_a_refused_command_leaves_no_folder(tmp_path, capsys, backend):
    settings = config(tmp_path / "output" / "deeper")
    assert main([*arguments_of(settings, backend), "model.path=./nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (settings.run_dir / "mine").mkdir(parents=True)
    with lock_run(settings.run_dir):
        pass
    assert (settings.run_dir / "mine").is_dir()
