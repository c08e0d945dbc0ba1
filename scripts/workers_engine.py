"""A local rollout engine with several workers, which the product has only in verl. For measurements.

vLLM's engine stays in this process, its workers are processes of their own, and each has QaRL's receiver. A publish
reaches them through a file in shared memory. Everything else is `qarl.rollout.engine.RolloutEngine`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qarl.quant.meta_model import default_dtype_kept
from qarl.rollout import engine
from qarl.rollout.engine import EngineConfig, RolloutEngine
from qarl.rollout.publish.receive import WeightReceiver
from qarl.rollout.publish.wire import Manifest, NamedTensor, check_same_layers, expected_manifest


class WorkersEngine(RolloutEngine):
    """A RolloutEngine that `workers` processes share by tensor parallelism. Its publishes are never deltas."""

    def __init__(self, config: EngineConfig, workers: int) -> None:
        self.workers = workers
        super().__init__(replace(config, delta=False))

    def _start(self) -> None:
        from vllm import LLM

        arguments = engine.llm_arguments(self.config)
        self._dynamo_was_disabled, self._asleep = None, False
        with default_dtype_kept():
            self.llm = LLM(**arguments, tensor_parallel_size=self.workers, distributed_executor_backend="mp")
        self._prepare_publish()

    def _prepare_publish(self) -> None:
        config = self.config
        self.expected: Manifest = expected_manifest(self.hf_config, config.scheme, config.ignore)
        reloaded = self.llm.collective_rpc(make_receiver, args=(self.expected,))
        if any(reloaded):
            raise RuntimeError(f"vLLM would reload {reloaded}")
        self.receiver: Any = Receivers(self.llm)


class Receivers:
    """The receivers of all workers, as one. It has the attributes that `publish_weights` and RolloutEngine read."""

    kept = None

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.version: int | None = None
        self.stale_because, self.broken, self.kv_cache_spoilt = "nothing was published yet", False, False
        self.seconds: dict[str, float] = {}

    @property
    def stale(self) -> bool:
        return self.version is None

    def mark_stale(self, reason: str) -> None:
        self.version, self.stale_because = None, reason

    def feed(self, weights: Iterable[NamedTensor]) -> None:
        self.mark_stale("the publish did not complete")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            file = Path(folder) / "publish.pt"
            torch.save(list(weights), file)
            answers = self.llm.collective_rpc(feed_receiver, args=(str(file),))
        versions = {version for version, _ in answers}
        if len(versions) != 1:
            raise RuntimeError(f"the workers have versions {versions}")
        (self.version,), self.seconds = versions, answers[0][1]


def make_receiver(worker: Any, expected: Manifest) -> list[str]:
    """Runs in each worker. Returns the modules that would not be written directly."""
    check_same_layers(worker.get_model(), expected)
    worker.qarl_receiver = WeightReceiver.of_runner(worker.model_runner, expected, clone=False)
    return [target.name for target in worker.qarl_receiver.plan.by_owner.values() if target.writer is None]


def feed_receiver(worker: Any, file: str) -> tuple[int | None, dict[str, float]]:
    """Runs in each worker."""
    worker.qarl_receiver.feed(torch.load(file, mmap=True))
    return worker.qarl_receiver.version, worker.qarl_receiver.seconds
