"""Fixtures of the tests of qarl/verl."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkout import ROOT
from verl_runs import quickstart

from qarl.config import write_resolved


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the checkout; what the set-up of a run writes to the environment is taken back."""
    monkeypatch.chdir(ROOT)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def opened(own_environment: None, tmp_path: Path) -> Callable[..., int]:
    """The step that an interrupted quickstart resumes from, with changes of its config."""
    from qarl.verl.checkpoint import open_verl_run

    def start(**changes: object) -> int:
        with open_verl_run(quickstart(**{"output_dir": str(tmp_path), **changes})) as step:
            return step

    run = tmp_path / "quickstart_verl"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    write_resolved(quickstart(output_dir=str(tmp_path)), run / "config.yaml")
    start.run, start.tracker = run, run / "checkpoints" / "latest_checkpointed_iteration.txt"
    return start
