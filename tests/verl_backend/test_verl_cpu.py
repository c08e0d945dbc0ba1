"""verl's engines on a CPU are always eager."""

from __future__ import annotations

import pytest
from verl_runs import quickstart

pytest.importorskip("verl")

from qarl.verl.process import worker_environment
from qarl.verl.run import differences, verl_config


def test_a_cpu_never_compiles():
    """Its workers have TORCHDYNAMO_DISABLE, with which vLLM cannot compile."""
    config = quickstart(**{"rollout.enforce_eager": False})
    for on_cpu in (True, False):
        assert verl_config(config, on_cpu=on_cpu).actor_rollout_ref.rollout.enforce_eager is on_cpu
        assert ("TORCHDYNAMO_DISABLE" in worker_environment(config, on_cpu)) is on_cpu
        assert ("enforce_eager=false becomes true here" in " ".join(differences(config, on_cpu))) is on_cpu
