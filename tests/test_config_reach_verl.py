"""Every key of the config reaches its consumer in verl and changes what it should.

As test_config_reach.py, with verl's own pieces in the trainer's place (`reach_verl`): its dataset, its training loop, its
actor worker, the arguments that its server gives vLLM. They run in one process beside this one, for all rows at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from reach_rows import (
    MATRIX,
    OPEN,
    SIGN,
    STEPS,
    W4A16,
    Observe,
    Refused,
    Row,
    Table,
    adopts,
    all_differ,
    cosine,
    each,
    forwards,
    leaves,
    lr_of_updates,
    merged,
    moved,
    remembers,
    tensors_close,
    updates,
    written,
)

from qarl.config import build_config
from qarl.errors import UserError
from qarl.trainer.verl_checks import refuse_unsupported


def argument(name: str) -> Observe:
    """One of vLLM's arguments, from verl's server."""
    return lambda run: getattr(run.engine, name)


def sampling(name: str, validate: bool = False) -> Observe:
    """The values of one sampling parameter over the responses to a prompt."""
    return lambda run: {params[name] for params in run.sampled(validate)}


def metric(name: str) -> Observe:
    """At the last step."""
    return lambda run: run.metrics[-1][name]


def steps(event: str) -> Observe:
    """At which steps verl's loop does it."""
    return lambda run: [step for what, step in run.events if what == event]


def prompts_in(first: int, count: int) -> Observe:
    return lambda run: {prompt[0] for prompt in run.prompts} <= set(range(first, first + count))


VERL: Table = {
    "data.train_batch_size": Row(6, each(lambda run: len(run.prompts), updates), ([4, 2], [6, 3])),
    "actor.ppo_mini_batch_size": Row(4, updates, (2, 1)),
    "rollout.n": Row(3, lambda run: len(run.sampled()), (2, 3)),
    "rollout.max_num_seqs": Row(7, argument("max_num_seqs"), (256, 7)),
    "trainer.test_freq": Row(2, steps("validate"), ([], [2, 4, 5]), {STEPS: 5}),
    "data.max_response_length": Row(5, each(argument("max_model_len")), ([14], [11])),
    "optim.lr": Row(2e-2, lr_of_updates, lambda b, a: adopts(b, a, [1, 1], [2, 2]), SIGN),
}
ROWS = written(VERL)


@pytest.fixture(scope="module")
def observed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the rows that were asked for observe."""
    keys = [item.callspec.id for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    folder = tmp_path_factory.mktemp("reach")
    command = [sys.executable, str(ROOT / "tests/reach_verl.py"), str(folder / "files"), str(folder / "observed.pt"), *keys]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "VERL_PLATFORM": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "observed.pt", weights_only=False)


@pytest.mark.parametrize(("key", "row"), ROWS)
def test_a_key_changes_what_it_should(request, observed, key, row):
    found = observed[request.node.callspec.id]
    assert not isinstance(found, str), found
    row.check(*found)
