"""An update queues its micro-batches without waiting for the device, as far as a CPU can count it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cpu_features import needs_w4a16_cpu
from engine_helpers import config
from packed_rows import made_batch, make_policy
from random_models import save_random_model
from updating_trainer import updating_trainer
from waits import Waits

pytestmark = pytest.mark.usefixtures("in_the_checkout")
HOST = (
    "qarl/kernels/cpu/",  # the kernels of a CPU
    "qarl/kernels/grouped.py:weight_gradient",  # reads the ends of experts' rows there
    "qarl/kernels/reference.py",
    "qarl/trainer/layout.py",  # computes from lengths that the host knows
)
"""Functions that a run on a GPU does not call, or whose tensors are on the host in it."""
EIGHT = [(3, 40), (9, 11), (1, 7), (30, 20), (5, 0), (12, 33), (2, 64), (4, 9)]


def counted(trainer: Any, rows: int) -> Waits:
    """What the pass for old log-probs and the backward of eight responses, in micro-batches of `rows`, wait for."""
    size = {"ppo_micro_batch_size_per_gpu": rows, "log_prob_micro_batch_size_per_gpu": rows}
    actor = trainer.config.actor.model_copy(update=size)
    trainer.config = trainer.config.model_copy(update={"actor": actor})
    batch = made_batch(EIGHT)
    assert batch.host_lengths.responses[:2] == (40, 11)  # known before the batch goes to a device
    with Waits(*HOST) as waits:
        old = trainer.policy.batch_log_probs(batch, trainer.config)
        trainer.backward(batch, old, slice(0, 8))
    trainer.optimizer.zero_grad()
    return waits


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("level", ["off", pytest.param("linears", marks=needs_w4a16_cpu)])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_micro_batch_waits_for_nothing(
    tmp_path: Path, family: str, level: str, packed: bool
) -> None:
    """Whether there are two or eight, the update waits once, for their statistics. A micro-batch sends its places once
    for each forward."""
    policy = make_policy(save_random_model(tmp_path / "model", family), level, packed=packed)
    trainer = updating_trainer(config(tmp_path), policy)
    counted(trainer, 4)  # whose first forward quantizes
    for rows in (4, 1):
        waits = counted(trainer, rows)
        assert waits.waits == {("read", "qarl/tbpo/reading.py:read"): 1}
        assert waits.places["upload", "qarl/kernels/base.py:upload"] == 2 * 8 // rows
