"""verl's engines on a CPU: always eager, and one worker for W8A8."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from verl_runs import quickstart

pytest.importorskip("verl")

from qarl.errors import UserError
from qarl.verl.process import worker_environment
from qarl.verl.run import differences, verl_config


def test_int8_on_several_cpu_workers_is_refused():
    for scheme, size, refused in (("w8a8", 2, True), ("w8a8", 1, False), ("fp8", 2, False), ("w4a16", 2, False)):
        config = quickstart(
            **{"quant.scheme": scheme, "rollout.tensor_model_parallel_size": size, "trainer.n_gpus_per_node": 2}
        )
        for on_cpu in (True, False):
            with pytest.raises(UserError, match="cannot be split") if refused and on_cpu else nullcontext():
                verl_config(config, on_cpu=on_cpu)


def test_a_cpu_never_compiles():
    """Its workers have TORCHDYNAMO_DISABLE, with which vLLM cannot compile."""
    config = quickstart(**{"rollout.enforce_eager": False})
    for on_cpu in (True, False):
        assert verl_config(config, on_cpu=on_cpu).actor_rollout_ref.rollout.enforce_eager is on_cpu
        assert ("TORCHDYNAMO_DISABLE" in worker_environment(config, on_cpu)) is on_cpu
        assert ("enforce_eager=false becomes true here" in " ".join(differences(config, on_cpu))) is on_cpu
