"""A rollout engine of two processes on a CPU: vLLM with tensor parallelism 2, each worker with half of every matrix.

The local backend has one process only, and verl needs a trainer process for each worker. This engine lets
`qarl.trainer.local.LocalTrainer` publish to both workers. A publish goes through a file that both map; each worker has
the receiver that an engine in one process has.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import torch

from qarl.quant.meta import default_dtype_kept
from qarl.quant.scheme import Scheme
from qarl.rollout.engine import RolloutEngine, _llm_arguments
from qarl.rollout.publish.manifest import check_same_layers, expected_manifest
from qarl.rollout.publish.receive import WeightReceiver
from qarl.rollout.publish.wire import NamedTensor

_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process has no OpenMP threads
    "TORCHDYNAMO_DISABLE": "1",  # as in `RolloutEngine`: half a minute of C++ at the first request
}


class TwoWorkers(RolloutEngine):
    """`RolloutEngine` for samples and publishes; a lost one is not rebuilt."""

    def _start(self) -> None:
        for key, value in _ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        from vllm import LLM

        self._dynamo_was_disabled = None
        parallel: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        with default_dtype_kept():
            self.llm = LLM(**_llm_arguments(self.config), **parallel)
        self.expected = expected_manifest(self.hf_config, self.config.scheme, self.config.ignore)
        self.receiver: Any = Receivers(self.llm, self.config.scheme, self.config.ignore)


class Receivers:
    """The workers' receivers, with what `publish_weights` needs of one. `methods`: vLLM's class for the experts of each
    worker."""

    def __init__(self, llm: Any, scheme: Scheme, ignore: tuple[str, ...]) -> None:
        self.llm = llm
        self.version: int | None = None
        self.stale_because = "nothing has been published to it yet"
        self.broken = self.kv_cache_spoilt = False
        self.seconds: dict[str, float] = {}
        self.methods: list[str] = llm.collective_rpc(_make_receiver, args=(scheme, ignore))

    @property
    def stale(self) -> bool:
        return self.version is None

    def mark_stale(self, reason: str) -> None:
        self.version, self.stale_because = None, reason

    def feed(self, stream: Iterable[NamedTensor]) -> None:
        """Give a whole publish to both workers; `seconds` are the slower one's."""
        self.mark_stale("a publish did not complete")
        with tempfile.TemporaryDirectory() as folder:
            start, file = time.perf_counter(), f"{folder}/publish.pt"
            torch.save(list(stream), file)
            written = time.perf_counter() - start
            found = self.llm.collective_rpc(_feed, args=(file,))
        (self.version,) = {version for version, _ in found}
        self.seconds = {"file": written} | {key: max(s[key] for _, s in found) for key in found[0][1]}


def _make_receiver(worker: Any, scheme: Scheme, ignore: tuple[str, ...]) -> str:
    """Runs in each worker."""
    model = worker.get_model()
    expected = expected_manifest(worker.vllm_config.model_config.hf_config, scheme, ignore)
    check_same_layers(model, expected)
    worker.qarl_receiver = WeightReceiver(model, worker.vllm_config, expected, kv_caches=lambda: [])
    return type(model.model.layers[0].mlp.experts.routed_experts.quant_method).__name__


def _feed(worker: Any, file: str) -> tuple[int | None, dict[str, float]]:
    """Runs in each worker."""
    receiver: WeightReceiver = worker.qarl_receiver
    receiver.feed(torch.load(file, mmap=True))
    return receiver.version, receiver.seconds
