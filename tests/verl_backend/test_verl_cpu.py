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


def test_engines_on_gpus_capture_graphs_and_compile_nothing():
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    for asked, on_cpu, wanted in (
        (None, False, graphs),
        (False, False, graphs),
        (True, False, None),
        (None, True, None),
    ):
        rollout = verl_config(quickstart(**{"rollout.enforce_eager": asked}), on_cpu=on_cpu).actor_rollout_ref.rollout
        assert rollout.engine_kwargs.vllm.get("compilation_config") == wanted
        assert rollout.enforce_eager is (wanted is None)
        assert rollout.free_cache_engine is not on_cpu
