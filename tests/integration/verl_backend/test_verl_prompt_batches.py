"""verl.data.*: sizes of batches of prompts are refused where verl stops, or reads another size in silence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from verl_runs import quickstart

pytest.importorskip("verl")

from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from qarl.errors import UserError
from qarl.verl.run import verl_config

pytestmark = pytest.mark.usefixtures("own_environment")
VAL, GEN, WORKERS = "data.val_batch_size", "data.gen_batch_size", "data.dataloader_num_workers"


def refusal(**verls: Any) -> str | None:
    try:
        verl_config(quickstart(verl=verls), on_cpu=True)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("key", [VAL, GEN])
@pytest.mark.parametrize("size", [0, -1, 2.5, "many", True])
def test_a_size_that_is_no_number_of_prompts_is_refused(key: str, size: Any) -> None:
    said = refusal(**{key: size}) or ""
    assert said.startswith(f"{key}={size} cannot be used"), said
    assert "a whole number above 0, or to null" in said


@pytest.mark.parametrize("size", [-1, 2.5, "many"])
def test_torchs_loader_refuses_it_too(size: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        list(StatefulDataLoader([1, 2, 3], batch_size=size))


@pytest.mark.parametrize("size", range(1, 25))
def test_a_step_is_whole_batches_by_verls_own_rule(size: int) -> None:
    config = SimpleNamespace(data=_Data(train_batch_size=12, gen_batch_size=size))
    trainer = SimpleNamespace(config=config, _fetch_one_gen_batch=None)
    with pytest.raises((ValueError, TypeError)) as stopped:
        PPOTrainer._next_train_batch(trainer)
    stops = stopped.type is ValueError  # otherwise it goes on, and there is nothing to fetch
    said = refusal(**{GEN: size})
    assert (said is not None) == stops
    assert said is None or "divisor of 12" in said


@pytest.mark.parametrize("workers", [-1, None, "all"])
def test_a_number_of_readers_is_a_number(workers: Any) -> None:
    assert f"{WORKERS}={workers} cannot be used" in (refusal(**{WORKERS: workers}) or "")


def test_usual_sizes_are_accepted() -> None:
    assert refusal(**{VAL: 7, GEN: 4, WORKERS: 0}) is None
    assert refusal(**{VAL: None, GEN: None}) is None


class _Data(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)
