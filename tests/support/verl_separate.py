"""Publishes by verl's CheckpointEngineManager between Ray actors: run by test_verl_checkpoint_engine.py.

    verl_separate.py FOLDER

The manager, the actor's worker, the rollout's worker and its adapter of servers are verl's, and the weights pass
through the checkpoint engine `qarl`, verl's buckets and QaRL's worker extension. Only the models are transformers', and
the server is not vLLM's. Like vLLM's, it works on one call at a time, so while it waits for weights it answers nothing.
Prints one JSON line for each publish. The third fails in the engine.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import verl  # noqa: F401  registers its platform
from checkout import ROOT
from publish_streams import engine_model, runner_of, weights
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker

LIMIT, REPLICA, LATE = 20, 977, "model.layers.1.mlp.down_proj.weight"
"""Seconds of QARL_PUBLISH_TIMEOUT. The replica's number is in the name of verl's socket, which no other run has."""
CONFIG: dict[str, Any] = {
    "backend": "qarl",
    "custom_backend_module": "qarl.verl.publish",
    "update_weights_bucket_megabytes": 1,
}


class Server:
    """In the place of vLLM's server. `publishes`: what its worker held after each."""

    def __init__(self) -> None:
        from qarl.verl import worker_extension

        job = ray.get_runtime_context().get_job_id()
        worker: Any = object.__new__(worker_extension.QaRLWorkerExtension)
        worker.device, worker.model_runner = torch.device("cpu"), runner_of(engine_model("llama"))
        worker.check_health = lambda: None
        worker._get_zmq_handle = lambda: (
            f"ipc:///tmp/rl-colocate-zmq-{job}-replica-{REPLICA}-rank-0.sock"
        )
        self.worker = worker

    def collective_rpc(
        self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> None:
        getattr(self.worker, method)(*args, **(kwargs or {}))

    def clear_kv_cache(self) -> None: ...

    def set_global_steps(self, step: int) -> None: ...

    def fail_once(self) -> None:
        receiver = self.worker._qarl_receiver
        take = receiver._take

        def failing(name: str, tensor: Any) -> None:
            receiver._take = take
            raise MemoryError("no memory")

        receiver._take = failing

    def state(self) -> tuple[Any, Any]:
        receiver = self.worker._qarl_receiver
        return receiver.weights.version, receiver.fingerprint


class Actor(ActorRolloutRefWorker):
    """verl's worker with QaRL's engine, whose tensors are given instead of gathered from FSDP2."""

    def __init__(self) -> None:
        from qarl.rollout.remote.wire import DeltaSender
        from qarl.verl.ask_servers import Watch
        from qarl.verl.config_classes import QuantSettings
        from qarl.verl.fsdp_engine import QaRLFSDPEngine

        Worker.__init__(self)
        self.tensors = weights("llama")
        engine: Any = object.__new__(QaRLFSDPEngine)
        engine.quant, engine.rank, engine.lr_scheduler = (
            QuantSettings(),
            0,
            SimpleNamespace(last_epoch=0),
        )
        engine._outbox, engine._servers = DeltaSender(), Watch(only_servers=True)
        engine._wire_tensors = lambda: iter(self.tensors)
        self.engine = engine
        worker: Any = SimpleNamespace(engine=engine)
        self.actor = worker
        import qarl.verl.publish  # noqa: F401  registers `qarl`

        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "qarl", is_master=True, bucket_size=1 << 20
        )

    def step(self) -> None:
        self.engine.lr_scheduler.last_epoch += 1
        self.tensors = [(name, tensor + (name == LATE)) for name, tensor in self.tensors]

    def sent(self) -> tuple[bool, Any]:
        outbox = self.engine._outbox
        return outbox.tally.known, outbox.cache.fingerprint


class Rollout(CheckpointEngineWorker):
    def __init__(self, folder: str) -> None:
        from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

        from qarl.rollout.remote import host_turn

        host_turn.FOLDER = Path(folder)  # waits for no other run on this machine
        engine = CheckpointEngineConfig(**CONFIG)
        config = RolloutConfig(name="vllm", tensor_model_parallel_size=1, checkpoint_engine=engine)
        unused: Any = None
        adapter = ServerAdapter(config, unused, unused, replica_rank=REPLICA)
        super().__init__(config, unused, adapter)


class Replica:
    """The part of verl's RolloutReplica that its manager uses."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    def __getattr__(self, name: str) -> Any:
        async def nothing(**options: Any) -> None: ...

        return nothing


def main(folder: str) -> None:
    environment = {
        "VERL_PLATFORM": "cpu",
        "OMP_NUM_THREADS": "1",
        "QARL_PUBLISH_TIMEOUT": str(LIMIT),
    }
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "RAY_LOCAL_WORLD_SIZE": "1"}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/support'}",
    }

    def started(kind: type, port: int, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        remote: Any = ray.remote(kind)
        variables = environment | {"MASTER_PORT": str(port)}
        return remote, remote.options(runtime_env={"env_vars": variables}, **options).remote(
            *arguments
        )

    with ExitStack() as stack:
        quiet: Any = {"include_dashboard": False, "log_to_driver": False}
        ray.init(address="local", num_cpus=4, object_store_memory=100 * 2**20, **quiet)
        stack.callback(ray.shutdown)
        _, server = started(Server, 0, name=f"vllm_server_{REPLICA}_0")
        actor_class, actor = started(Actor, 0)
        _, rollout = started(Rollout, free_port(), folder)
        ray.get(
            [
                server.__ray_ready__.remote(),
                actor.__ray_ready__.remote(),
                rollout.__ray_ready__.remote(),
            ]
        )
        group = RayWorkerGroup(
            worker_handles=[actor], ray_cls_with_init=RayClassWithInitArgs(cls=actor_class)
        )
        replica: Any = Replica([rollout])
        manager = CheckpointEngineManager(CheckpointEngineConfig(**CONFIG), group, [replica])
        for number in range(1, 6):
            ray.get(actor.step.remote())
            if number == 3:
                ray.get(server.fail_once.remote())
            start, error = time.monotonic(), ""
            try:
                manager.update_weights(number)
            except Exception as raised:
                error = str(raised)
            seconds = time.monotonic() - start
            delta, sent = ray.get(actor.sent.remote())
            version, tensors = ray.get(server.state.remote())
            row = {
                "version": version,
                "equal": tensors == sent,
                "delta": delta,
                "seconds": seconds,
                "error": error,
            }
            print(json.dumps(row), flush=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
