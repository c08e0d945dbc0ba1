"""Two runs on one host, on the one socket that verl gives both."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from checkout import ROOT

pytest.importorskip("verl")
pytest.importorskip("vllm")


def publish(tmp_path, rounds: int, *, apart: bool) -> list[dict]:
    """The publishes that each of two runs got, of `rounds`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "support" / "verl_two_runs.py")]
    handle, folder = f"ipc://{tmp_path}/socket", str(tmp_path) if apart else ""
    outputs = [tmp_path / f"{run}.json" for run in (1, 2)]
    runs = [
        subprocess.Popen(
            [*command, str(number), handle, str(rounds), folder, str(output)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, output in zip((1, 2), outputs, strict=True)
    ]
    said = [run.communicate(timeout=200)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    return [json.loads(output.read_text()) for output in outputs]


def test_each_run_gets_its_own_weights_every_time(tmp_path):
    assert publish(tmp_path, 20, apart=True) == [{"own": 20, "foreign": 0, "silent": 0, "errors": []}] * 2


@pytest.mark.slow
def test_runs_that_do_not_wait_are_never_given_the_others_weights(tmp_path):
    """A run of another kind does not wait. Most of these publishes fail, by a name or in time; none is wrong, and none
    that brought nothing goes unsaid."""
    for found in publish(tmp_path, 4, apart=False):
        assert found["foreign"] == found["silent"] == 0, found
        assert found["own"] + len(found["errors"]) >= 4
