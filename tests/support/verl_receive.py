"""QaRL's worker extension at the end of verl's own sender, on verl's platform `cpu`: run by test_verl_publish.py.

    verl_receive.py OUTPUT_FILE

For each case: what the worker raised, the names that its receiver was fed, whether the sender came to its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import verl  # noqa: F401  registers its platform
from publish_streams import engine_model, feed_in_buckets, runner_of, weights
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from qarl.errors import UserError
from qarl.rollout.remote.receive import StreamReceiver
from qarl.rollout.remote.wire import DeltaSender, encode_publish
from qarl.verl import worker_extension
from qarl.verl.publication import publication, run_identity


class Receiver:
    """Takes what comes; or holds a view of it and fails; or misses the last record."""

    adapter = None

    def __init__(self, fails: bool = False, stops: bool = False) -> None:
        self.fails, self.stops = fails, stops
        self.names: list[str] = []
        self.stale, self.stale_because = False, ""

    def mark_stale(self, reason: str, *, doubt: bool = True) -> None:
        self.stale, self.stale_because = True, reason

    def feed(self, weights: Any) -> None:
        for name, tensor in weights:
            self.names.append(name)
            self.stale = self.stops
            if self.fails:
                view = tensor.view(-1)
                raise ValueError(f"no room for {name}, {view.numel()} elements")


MAKE = worker_extension.make_receiver  # `publish` replaces it
NO_ADAPTERS = SimpleNamespace(lora_config=None)
TENSORS = [(f"part{i}", torch.full((1 << 18,), i, dtype=torch.float32)) for i in range(3)]


def publish(make_receiver: Any, tensors: Any = TENSORS) -> dict[str, Any]:
    """Three buckets through shared memory."""
    worker_extension.make_receiver = make_receiver
    handle = f"ipc://{tempfile.mkdtemp()}/socket"
    sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    errors: list[str] = []

    def send() -> None:
        try:
            asyncio.run(sender.async_send_weights(iter(tensors)))
        except Exception as error:
            errors.append(repr(error))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    worker: Any = object.__new__(worker_extension.QaRLWorkerExtension)
    worker.device, worker.model_runner = (
        torch.device("cpu"),
        SimpleNamespace(device="cpu", vllm_config=NO_ADAPTERS),
    )
    worker._get_zmq_handle = lambda: handle
    raised = None
    try:
        worker.update_weights_from_ipc(use_shm=True)
    except Exception as error:
        raised = repr(error)
    thread.join(timeout=10)
    names = getattr(getattr(worker, "_qarl_receiver", None), "names", [])
    return {"raised": raised, "names": names, "sent": not thread.is_alive(), "errors": errors}


def cannot_be_made(worker: Any, run: str) -> Any:
    raise ValueError("the engine quantizes other layers")


def worker_of(runner: Any) -> Any:
    return SimpleNamespace(model_runner=runner)


def reuses_its_buffer() -> dict[str, Any]:
    """The receiver that a worker makes, given views of memory that the next tensor overwrites."""
    run = run_identity()
    receiver = MAKE(worker_of(runner_of(engine_model("llama"))), run)
    feed_in_buckets(receiver, encode_publish(weights("llama"), version=1, run=run))
    return {"version": receiver.weights.version}


def changes_through_buckets() -> dict[str, Any]:
    """Three publishes of one worker through verl's sender: all tensors, changes, and all tensors after a loss."""
    model, tensors, outbox = engine_model("llama"), weights("llama"), DeltaSender()
    receiver = MAKE(worker_of(runner_of(model)), run_identity())
    result: list[dict[str, Any]] = []
    for version in (1, 2, 3, 4):
        sent = publication(tensors, version, outbox)
        sent.receivers[:] = [receiver.fingerprint]
        stream = list(sent)
        if version == 3:  # nothing of it arrives
            tensors = [(name, tensor + 1) for name, tensor in tensors]
            continue
        outcome = publish(lambda *_: receiver, tensors=stream)
        state = model.state_dict()
        equal = all(torch.equal(state[name], tensor) for name, tensor in tensors)
        result.append(
            {
                "raised": outcome["raised"],
                "equal": equal,
                "version": receiver.weights.version,
                **outbox.metrics(),
            }
        )
        tensors = [(name, tensor + (name == "model.norm.weight")) for name, tensor in tensors]
    return {"publishes": result}


def adapter_of_a_worker() -> list[Any]:
    """What a worker answers before a publish, after one, once the base is lost, and once vLLM has lost the adapter."""
    worker: Any = object.__new__(worker_extension.QaRLWorkerExtension)
    answers = [(worker.qarl_adapter(), worker.qarl_has_base())]
    request = SimpleNamespace(lora_name="v1", lora_int_id=3)
    target: Any = SimpleNamespace(check_present=lambda: None, request=request, version=1)
    base = MAKE(worker_of(runner_of(engine_model("llama"))), run_identity()).weights
    base.version = 1
    worker._qarl_receiver = StreamReceiver(base, target)
    answers.append((worker.qarl_adapter(), worker.qarl_has_base()))
    base.mark_stale("a publish failed")
    answers.append((worker.qarl_adapter(), worker.qarl_has_base()))

    def lost() -> None:
        raise UserError("", why="vLLM has the adapters [] now")

    target.check_present = lost
    return [*answers, (worker.qarl_adapter(), worker.qarl_has_base())]


results = {
    "adapter": adapter_of_a_worker(),
    "changes": changes_through_buckets(),
    "reused": reuses_its_buffer(),
    "well": publish(lambda *_: Receiver()),
    "not made": publish(cannot_be_made),
    "on the way": publish(lambda *_: Receiver(fails=True)),
    "stops": publish(lambda *_: Receiver(stops=True)),
    "nothing": publish(lambda *_: Receiver(), tensors=[]),
}
Path(sys.argv[1]).write_text(json.dumps(results), encoding="utf-8")
os._exit(0)  # a sender that still waits would keep the process
