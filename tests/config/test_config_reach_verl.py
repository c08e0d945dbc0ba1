"""Every key of the config reaches its consumer in verl and changes what it should.

As test_config_reach.py, with verl's own pieces in the trainer's place (`reach_verl`): its dataset, its training loop,
its actor worker, the arguments that its server gives vLLM. They run in one process beside this one, for all rows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from checkout import ROOT
from reach_rows import Refused, leaves, merged
from reach_verl_rows import ROWS, VERL

from qarl.config import build_config
from qarl.errors import UserError
from qarl.verl.checks import refuse_unsupported

pytestmark = pytest.mark.verl


@pytest.fixture(scope="module")
def observed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Observations of the rows that were asked for."""
    keys = [
        item.callspec.id for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    folder = tmp_path_factory.mktemp("reach")
    command = [
        sys.executable,
        str(ROOT / "tests/support/reach_verl.py"),
        str(folder / "files"),
        str(folder / "observed.pt"),
        *keys,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "VERL_PLATFORM": "cpu"}
    environment |= {"RAY_RAYLET_PID": str(os.getpid()), "RAY_JOB_ID": "01000000"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "observed.pt", weights_only=False)


def test_every_key_has_a_row():
    assert set(VERL) == leaves()


@pytest.mark.parametrize(("key", "row"), ROWS)
def test_a_key_changes_what_it_should(request, observed, key, row):
    if isinstance(row, Refused):
        with pytest.raises(UserError) as caught:
            refuse_unsupported(build_config(merged(backend="verl", **row.given | {key: row.value})))
        assert row.why in str(caught.value)
        return
    found = observed[request.node.callspec.id]
    assert not isinstance(found, str), found
    if isinstance(found, dict):
        pytest.skip(found["skipped"])  # vLLM parses its arguments only where it has a device
    row.check(*found)
