"""When the engine of TRL's trainer is sent weights, and which seeds its requests get."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from qarl.rollout.publish.manifest import PublishReport
from qarl.trainer.policy import Policy
from qarl.trl.rollouts import Rollouts


def rollouts() -> tuple[Rollouts, torch.nn.Linear, list[int]]:
    model, published = torch.nn.Linear(2, 2), []
    policy: Any = SimpleNamespace(model=model, publish=None)
    engine: Any = SimpleNamespace(
        stale=False, publish_from=lambda source, version: published.append(version)
    )
    return Rollouts(policy, engine), model, published


def test_weights_are_published_when_the_step_or_the_weights_have_changed() -> None:
    publisher, model, published = rollouts()
    publisher.publish(0)
    publisher.publish(0)
    assert published == [0]
    with torch.no_grad():
        model.weight.add_(1)  # as transformers does when it loads the best checkpoint
    publisher.publish(0)
    publisher.publish(1)
    assert published == [0, 0, 1]
    publisher.engine.stale = True
    publisher.publish(1)
    assert published == [0, 0, 1, 1]


def test_the_policy_publishes_the_base_of_its_adapters_once() -> None:
    publisher, _, published = rollouts()
    policy, engine, report = publisher.policy, publisher.engine, PublishReport(0, 1, 1000, 0, 0, {})

    policy.publish = functools.partial(Policy.publish, policy)
    engine.publish_from = lambda source, version: source(engine, version=version)

    def publish_base(engine: Any, version: int) -> PublishReport:
        published.append(version)
        engine.has_weights = True
        return report

    policy.adapters, policy.publish_base = SimpleNamespace(adapter=lambda: "adapter"), publish_base
    engine.has_weights, engine.publish_adapter = False, lambda adapter, version: report
    sizes = []
    for step in (3, 4):
        publisher.publish(step)
        sizes.append(publisher.report.bytes)
    assert (published, sizes) == ([3], [2000, 1000])


def trainer(index: int = 0, *, training: bool = True) -> Any:
    accelerator = SimpleNamespace(num_processes=2, process_index=index)
    return SimpleNamespace(training=training, accelerator=accelerator, args=SimpleNamespace(seed=3))


def test_seeds_differ_by_process_and_call_and_do_not_depend_on_evaluations() -> None:
    without_evaluation, with_evaluation, other = (rollouts()[0] for _ in range(3))
    with_evaluation._seeds(trainer(training=False), 5, 4)
    first, again = (
        without_evaluation._seeds(trainer(), 5, 4),
        without_evaluation._seeds(trainer(), 5, 4),
    )
    assert with_evaluation._seeds(trainer(), 5, 4) == first
    seeds = [
        *first,
        *again,
        *other._seeds(trainer(1), 5, 4),
        *without_evaluation._seeds(trainer(), 6, 4),
    ]
    assert len(set(seeds)) == 16
