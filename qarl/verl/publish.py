"""QaRL's publish as a checkpoint engine of verl, whose configuration names this module.

`QaRLCheckpointEngine` publishes to rollout engines on other GPUs or hosts, through verl's checkpoint-engine interface:

    actor_rollout_ref.rollout.checkpoint_engine.backend=qarl
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=qarl.verl.publish

verl uses checkpoint engines only in trainers with separate rollout workers (`trainer_separate_async` and those in
verl/experimental). Its synchronous trainers share the GPUs and set the backend `naive`.

The actor's first rank sends the stream of a publish once to every rollout worker over TCP
(`qarl.rollout.remote.sockets`). The other ranks only take part in the gathers. Each rollout worker passes the stream
to its vLLM worker, as verl does with any backend. QaRL's receiver in the vLLM worker makes the usual checks of a
publish. verl's own backends send full BF16 tensors, or deltas of BF16 tensors.

During a publish, the vLLM workers wait for tensors and answer no questions. So each rollout worker stores the
fingerprint of the tensors in its vLLM worker. It updates this fingerprint in `finalize`, which verl calls only after a
publish that is complete on all workers. If the fingerprint is wrong, the vLLM worker's receiver refuses the delta. A
rollout worker passes on the last record only after all rollout workers have the whole stream.

The stream names its run by the host's Raylet, and each host has a different Raylet. So a rollout worker replaces the
actor's Raylet in the stream with its own. A token proves that actor and rollout worker belong to one run. The actor
makes a new token for every publish, and verl's manager sends it to the rollout workers. If Ray has nodes on several
hosts, the actor listens at the address of its node, otherwise at the loopback address.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from qarl.rollout.publish.manifest import NamedTensor
from qarl.rollout.remote.records import (
    BEGIN,
    COMMIT,
    TransferFailed,
    read_record,
    record,
    without_number,
)
from qarl.rollout.remote.sockets import Address, WeightClient, WeightServer, own_address
from qarl.verl.publication import publish_timeout, reserved, run_identity


@CheckpointEngineRegistry.register("qarl")
class QaRLCheckpointEngine(CheckpointEngine):
    """One side of a publish. verl calls its methods in the order of this class, once per publish.

    `is_master`: whether this is the actor's first rank. `bucket_size`: not used. `host`: the address of the actor's
    host that the rollout workers can reach. By default `own_address` chooses it. To set it, use
    actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.qarl.host."""

    wire_format = "named_tensors"

    def __init__(
        self, bucket_size: int = 0, is_master: bool = False, host: str | None = None
    ) -> None:
        self.is_master = is_master
        self.host = host
        self.token = ""
        self.address: Address = ("", 0)
        self.server: WeightServer | None = None
        self._fingerprint: str | None = None
        self._arrived: str | None = None

    def prepare(self) -> dict[str, Any]:
        """Start to listen, and return the address and a new token. Ranks other than the actor's first return {}."""
        self._close()  # verl does not call `finalize` after a failed publish
        if not self.is_master:
            return {}
        self.token = secrets.token_hex(16)
        self.server = WeightServer(
            self.token, host=self.host or own_address(), seconds=publish_timeout()
        )
        return {"address": self.server.address, "token": self.token}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for every rank of the actor and for every rollout worker."""
        (master,) = [rank for rank in metadata[:actor_wg_world_size] if rank]

        same = master | {"receivers": rollout_world_size}

        def arguments(first: int, size: int) -> dict[str, list[Any]]:
            return {"rank": list(range(first, first + size))} | {
                key: [value] * size for key, value in same.items()
            }

        return arguments(0, actor_wg_world_size), arguments(actor_wg_world_size, rollout_world_size)

    def init_process_group(self, **arguments: Any) -> None:
        """Store the arguments that `build_topology` returned for this rank. Connections are made later."""
        self.address = arguments["address"]
        self.token = arguments["token"]
        if self.server is not None:
            self.server.receivers = arguments["receivers"]

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Send `weights`, the actor's `get_per_tensor_param`. All ranks of the actor call this together.

        Raises:
            PeerLost: a rollout worker was killed or did not answer within QARL_PUBLISH_TIMEOUT.
            TransferFailed: a rollout worker refused the publish.
        """
        try:
            if self.server is not None:

                def stream(known: Sequence[str | None]) -> Iterator[NamedTensor]:
                    weights.receivers[:] = known
                    return iter(weights)

                self.server.publish(stream)
        except BaseException:
            with suppress(Exception):  # a second error must not hide the first
                _read_all(weights)
            raise
        _read_all(weights)

    def receive_weights(self, global_steps: int | None = None) -> Generator[NamedTensor]:  # type: ignore[override]  # async in verl
        """Return the received stream, for verl to send to the vLLM worker on this host. Its sockets have time limits.

        Raises:
            PeerLost: the actor was lost. This is raised in the middle of the stream.
            TransferFailed: a different rollout worker did not get the publish, which is raised at the end of the
                stream; or the publish is not of version `global_steps`, with which verl will label what its engine
                samples.
        """
        return reserved(self._received(global_steps))

    def _received(self, version: int | None = None) -> Generator[NamedTensor]:
        fingerprint = self._fingerprint
        self._fingerprint = None
        self._arrived = None
        with WeightClient(
            self.address, self.token, fingerprint=fingerprint, seconds=publish_timeout()
        ) as client:
            for name, tensor in client.stream():
                plain = without_number(name)
                if plain == BEGIN:
                    begin = read_record(BEGIN, tensor)
                    refuse_other_version(begin, version)
                    yield name, record(BEGIN, begin | {"run": run_identity()})[1]
                    continue
                if plain == COMMIT:
                    fingerprint = read_record(COMMIT, tensor).get("fingerprint")
                    client.answer(fingerprint=fingerprint)
                    self._arrived = fingerprint
                yield name, tensor

    def finalize(self) -> None:
        """End a publish that was complete on all workers. verl does not call this after an error."""
        self._fingerprint = self._arrived
        self._arrived = None
        self._close()

    def _close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None


def refuse_other_version(begin: Mapping[str, Any], version: int | None) -> None:
    """Raise TransferFailed if `begin`, the first record of a publish, is not of `version`, unless that is None."""
    if version is None or begin["version"] == version:
        return
    raise TransferFailed(
        f"the actor sent version {begin['version']} of the weights where verl expects version {version}",
        where="the first record of the publish",
        why="verl would label what the engine samples with another version than that of its weights",
        fix="train with QaRL's trainer and worker (trainer.staleness, or trainer.v1.trainer_mode=qarl_separate_async)",
    )


def _read_all(weights: Any) -> None:
    """Read the rest of `weights`, because all ranks of the actor must take part in the gather of each tensor."""
    for _ in weights:
        pass
