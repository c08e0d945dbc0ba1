"""The transfer engine `qarl` in vLLM's own worker methods, without an engine: two workers and a trainer in threads.

What vLLM's executor does is imitated: it calls every worker, and an error of one is an error of the call."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_features import NO_VLLM_CPU, vllm_is_for_cpus
from publish_streams import engine_model, receiver, weights

if not vllm_is_for_cpus():
    pytest.skip(NO_VLLM_CPU, allow_module_level=True)

from torch import nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.worker import gpu_worker

from qarl.errors import UserError
from qarl.rollout.remote import vllm_transfer
from qarl.rollout.remote.records import COMMIT, TransferFailed
from qarl.rollout.remote.sockets import PeerLost
from qarl.rollout.remote.vllm_transfer import (
    PackedSource,
    QaRLTrainerInitInfo,
    QaRLTrainerTransfer,
    QaRLTransferEngine,
)

pytestmark = pytest.mark.vllm


class Logits(LogitsProcessor):
    """Without vLLM's set-up, which it does not need here."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class OneWorker(gpu_worker.Worker):
    """vLLM's worker, without its set-up: only its methods for weights."""

    def __init__(self, workers: int) -> None:
        self.vllm_config, self.rank = (
            SimpleNamespace(load_config=SimpleNamespace(load_format="auto")),
            0,
        )
        self._weight_update_active = self._weight_update_is_draft = False
        self.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
        model = engine_model("llama")
        model.logits_processor = Logits()
        engine = object.__new__(QaRLTransferEngine)
        engine.model = engine._default_model = model
        engine.model_config = engine._default_model_config = SimpleNamespace(hf_config=model.config)
        engine.vllm_config, engine.parallel_config = (
            self.vllm_config,
            SimpleNamespace(world_size=workers),
        )
        self.weight_transfer_engine = engine

    def logits(self) -> Any:
        return self.weight_transfer_engine.model.logits_processor(torch.ones(1))


class Executor:
    """vLLM's interface for weights, to several workers. `left_over`: errors after the first one of a call, which vLLM's
    executor would take for replies to the next call."""

    def __init__(self, workers: int) -> None:
        self.workers = [OneWorker(workers) for _ in range(workers)]
        self.told: dict[str, Any] = {}
        self.left_over = 0

    def all(self, method: str, *arguments: Any) -> None:
        errors: list[Exception] = []

        def call(worker: OneWorker) -> None:
            try:
                getattr(worker, method)(*arguments)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(worker,)) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        self.left_over += max(len(errors) - 1, 0)
        if errors:
            raise errors[0]

    def init_weight_transfer_engine(self, info: Any) -> None:
        self.told = info
        for worker in self.workers:
            worker.init_weight_transfer_engine(info)

    def start_weight_update(self) -> None:
        self.all("start_weight_update")

    def update_weights(self, info: Any) -> None:
        self.all("update_weights", info)

    def finish_weight_update(self, version: Any) -> None:
        self.all("finish_weight_update")


@pytest.fixture(autouse=True)
def without_vllms_config(monkeypatch):
    from contextlib import nullcontext

    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda config: nullcontext())
    monkeypatch.setattr(
        vllm_transfer, "engines_manifest", lambda config, model: receiver(model).weights.expected
    )


def trainer(executor: Executor, tensors: Any, **options: Any) -> QaRLTrainerTransfer:
    info = QaRLTrainerInitInfo(rank=0, workers=len(executor.workers), seconds=20, **options)
    return QaRLTrainerTransfer.trainer_init(info, client=executor, source=PackedSource(tensors))


def break_once(worker: OneWorker) -> None:
    receiver = worker.weight_transfer_engine.receiver
    take = receiver._take

    def failing(name: str, tensor: Any) -> None:
        if name == COMMIT:
            receiver._take = take
            raise MemoryError("no memory")
        take(name, tensor)

    receiver._take = failing


def version(worker: OneWorker) -> int | None:
    return worker.weight_transfer_engine.receiver.weights.version


def test_dummy_weights_do_not_generate_before_a_publish():
    executor = Executor(2)
    for worker in executor.workers:
        worker.vllm_config.load_config.load_format = "dummy"
    for worker in executor.workers:
        worker.logits()  # vLLM warms up
    tensors = weights("llama")
    send = trainer(executor, lambda: tensors)
    for worker in executor.workers:
        with pytest.raises(UserError, match="nothing was published to it"):
            worker.logits()
    send.send_weights()
    for worker in executor.workers:
        worker.logits()
    send.shutdown()


def test_a_failed_update_is_closed_in_all_workers():
    """Nobody generates from it, and the next publish is a full one that vLLM takes."""
    tensors, executor = weights("llama"), Executor(2)
    send = trainer(executor, lambda: tensors)
    for worker in executor.workers:
        worker.logits()  # vLLM warms up, and weights that it has loaded itself are complete
    send.send_weights()
    assert [version(worker) for worker in executor.workers] == [1, 1]
    break_once(executor.workers[-1])
    with pytest.raises(TransferFailed, match="no memory"):
        send.send_weights()
    assert [worker._weight_update_active for worker in executor.workers] == [False] * 2
    for worker in executor.workers:
        with pytest.raises(
            UserError, match=r"does not generate, because its last publish failed[\s\S]*no memory"
        ):
            worker.logits()
    send.send_weights()
    assert [version(worker) for worker in executor.workers] == [
        3,
        3,
    ] and not send.sender.tally.known
    for worker in executor.workers:
        worker.logits()
    send.send_weights()
    assert send.sender.tally.known and executor.left_over == 0
    send.shutdown()


@pytest.mark.parametrize("failing", ["start_weight_update", "update_weights"])
def test_after_a_failure_the_rest_of_the_tensors_is_read(failing, monkeypatch):
    """The other ranks of the trainer gather each tensor together with the one that sends it."""
    tensors, executor, read = weights("llama"), Executor(1), []
    send = trainer(
        executor, lambda: (read.append(name) or (name, tensor) for name, tensor in tensors)
    )
    send.server.seconds = send.info.seconds = 1

    def fail(*_: Any) -> None:
        raise ConnectionError("the engine is gone")

    monkeypatch.setattr(executor, failing, fail)
    with pytest.raises((ConnectionError, PeerLost)):
        send.send_weights()
    assert read == [name for name, _ in tensors]
    send.shutdown()


def test_a_source_may_have_the_matrices_of_a_checkpoint():
    layer = "model.layers.0.mlp.experts"
    send = trainer(Executor(0), list)
    names = [
        f"{layer}.{expert}.{matrix}_proj.weight"
        for expert in range(2)
        for matrix in ("gate", "up", "down")
    ]
    sent = dict(send._stream(iter([(name, torch.ones(4, 4)) for name in names]), []))
    assert {
        name: tuple(tensor.shape) for name, tensor in sent.items() if not name.startswith("qarl.")
    } == {
        f"{layer}.gate_up_proj.weight": (2, 8, 4),
        f"{layer}.down_proj.weight": (2, 4, 4),
    }
    send.shutdown()


def test_an_update_that_never_came_is_closed():
    """The engine's HTTP server lost the request between the start and the update."""
    tensors, executor = weights("llama"), Executor(2)
    send = trainer(executor, lambda: tensors)
    send.server.seconds = send.info.seconds = 1
    real, executor.update_weights = executor.update_weights, lambda info: None
    with pytest.raises(PeerLost, match="2 of 2 receivers did not answer"):
        send.send_weights()
    executor.update_weights = real
    send.server.seconds = send.info.seconds = 20
    send.send_weights()
    assert [version(worker) for worker in executor.workers] == [2, 2]
    send.shutdown()


def test_every_run_has_another_token_which_is_not_printed():
    """The engine gets it with the address, over the channel that the client has."""
    executor, tokens = Executor(1), []
    for _ in range(2):
        send = trainer(executor, list)
        tokens.append(executor.told["token"])
        assert (executor.told["host"], executor.told["port"]) == send.server.address
        assert tokens[-1] not in repr(send.info) + repr(
            executor.workers[0].weight_transfer_engine.info
        )
        send.shutdown()
    assert len(set(tokens)) == 2 and min(map(len, tokens)) >= 32
