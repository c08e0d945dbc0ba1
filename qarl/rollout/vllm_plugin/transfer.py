"""QaRL's publish as a transfer engine of vLLM: `WeightTransferConfig(backend="qarl")`.

vLLM 0.29 has a registry for transfer engines (vllm/distributed/weight_transfer), and QaRL adds one to it. vLLM's own
engines load BF16 weights by layerwise reload. This one receives the stream of `qarl.rollout.publish.wire` over TCP
(`qarl.rollout.publish.sockets`), with the same manifest, checksums, versions and deltas as any publish.

    trainer                                           vLLM's worker
    init_weight_transfer_engine(address, token)  ->   makes its receiver from its own config
    start_weight_update()                        ->   marks its weights as stale
    update_weights({})                           ->   connects, receives, checks, writes, answers
    finish_weight_update(version)                ->   raises unless the publish is complete

Three things are missing in vLLM's interface. First, vLLM never asks a transfer engine whether its weights are complete.
So after a failed publish vLLM itself would still generate, and the trainer must not ask it to. Second,
`finish_weight_update` does not reset the prefix cache, and `send_weights` has no way to do so. The client must. Third,
a transfer engine gets the model but not the model runner. So it looks in the attention layers for the KV caches, which
must be set to zero after NaN. `update_weights` is overridden because that of the base class synchronizes an
accelerator, which a CPU lacks.

According to its source, vLLM 0.24 cannot run this engine. It passes a transfer engine neither the config nor the start
and end of an update, and its worker begins a layerwise reload of the whole model before the engine has seen a record.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from qarl.errors import UserError
from qarl.rollout.publish.manifest import engines_manifest
from qarl.rollout.publish.outbox import Outbox
from qarl.rollout.publish.receive import WeightReceiver
from qarl.rollout.publish.sockets import DEFAULT_SECONDS, WeightClient, WeightServer
from qarl.rollout.publish.wire import NamedTensor, encode_publish


@dataclass
class QaRLInitInfo(WeightTransferInitInfo):
    """Where the trainer listens. `token`: the secret of this run. `seconds`: limit for every read and write."""

    host: str
    port: int
    token: str
    seconds: float = DEFAULT_SECONDS


@dataclass
class QaRLUpdateInfo(WeightTransferUpdateInfo):
    """Has no fields, because the records in the stream say everything about a publish."""


class QaRLTransferEngine(WeightTransferEngine[QaRLInitInfo, QaRLUpdateInfo]):
    """The receiver in one of vLLM's workers. vLLM makes it after it has loaded the model."""

    init_info_cls = QaRLInitInfo
    update_info_cls = QaRLUpdateInfo
    supports_draft_weight_update = False
    receiver: WeightReceiver | None = None
    info: QaRLInitInfo | None = None

    def init_transfer_engine(self, init_info: QaRLInitInfo) -> None:
        """Remember the trainer's address. A later call replaces it, for a trainer that was restarted."""
        self.info = init_info
        if self.receiver is None:
            expected = engines_manifest(self.model_config.hf_config, self.model)
            self.receiver = WeightReceiver(
                self.model, self.vllm_config, expected, kv_caches=lambda: kv_caches(self.vllm_config)
            )

    def start_weight_update(self) -> None:
        self._ready()[0].mark_stale("a publish was announced, but has not come", doubt=False)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: QaRLUpdateInfo) -> None:
        receiver, info = self._ready()
        with WeightClient((info.host, info.port), info.token, held=receiver.held, seconds=info.seconds) as client:
            client.feed(receiver)

    def finish_weight_update(self) -> None:
        receiver, _ = self._ready()
        if receiver.stale:
            raise UserError("the weights of this engine are not complete", why=receiver.stale_because, fix="publish")

    def shutdown(self) -> None:
        self.receiver = None

    def _ready(self) -> tuple[WeightReceiver, QaRLInitInfo]:
        if self.receiver is None or self.info is None:
            raise UserError(
                "the engine does not know where the trainer is", fix="call init_weight_transfer_engine first"
            )
        return self.receiver, self.info


def kv_caches(vllm_config: Any) -> list[torch.Tensor]:
    """Return the KV caches of the attention layers of a worker."""
    found: list[torch.Tensor] = []
    for layer in vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        found += [one for one in (cache if isinstance(cache, list | tuple) else [cache]) if torch.is_tensor(one)]
    return found


@dataclass
class QaRLTrainerInitInfo(TrainerInitInfo):
    """How the trainer publishes. `workers`: workers of all engines, each of which receives everything. `delta`: whether
    to send only changes if possible. `host`: address of this host that the engines can reach."""

    backend: ClassVar[str] = "qarl"

    token: str
    workers: int = 1
    host: str = "127.0.0.1"
    delta: bool = True
    seconds: float = DEFAULT_SECONDS


class PackedSource(WeightSource):
    """The tensors to publish, made by `tensors()` for each publish, for example `policy.quantize`."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors()]

    def __iter__(self) -> Iterator[NamedTensor]:
        return iter(self._tensors())


class QaRLTrainerTransfer(TrainerWeightTransferEngine[QaRLTrainerInitInfo]):
    """The trainer's side. On ranks other than the first, `send_weights` only iterates over the source, whose gathers
    need all ranks. `outbox`: what was sent last, with the metrics of the publish."""

    init_info_cls = QaRLTrainerInitInfo

    def __init__(
        self, init_info: QaRLTrainerInitInfo, *, client: Any, source: Iterable[NamedTensor] | None = None
    ) -> None:
        # vLLM declares its protocol WeightSource. QaRL reads any iterable of named tensors.
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)  # type: ignore[arg-type]
        self.info, self.outbox, self.version = init_info, Outbox(), 0
        self.server: WeightServer | None = None
        if self.is_sender:
            self.server = WeightServer(
                init_info.token, host=init_info.host, receivers=init_info.workers, seconds=init_info.seconds
            )
            self.connect()

    @classmethod
    def trainer_init(cls, init_info: QaRLTrainerInitInfo, *, client: Any, source: Any = None) -> QaRLTrainerTransfer:
        return cls(init_info, client=client, source=source)

    def connect(self) -> None:
        """Tell the engine where the trainer listens. Call it again for an engine that was restarted."""
        if self.server is not None:
            host, port = self.server.address
            self.client.init_weight_transfer_engine(
                {"host": host, "port": port, "token": self.info.token, "seconds": self.info.seconds}
            )

    def send_weights(self, version: int | None = None) -> None:
        """Publish the source's tensors. `version`: by default one more than the last.

        Raises:
            PeerLost: a worker was lost. Restart the engine, call `connect`, and publish again.
            TransferFailed: a worker refused the publish.
            Exception: what the client raised.
        """
        assert self.source is not None, "pass a source, for example PackedSource(policy.quantize)"
        self.version = self.version + 1 if version is None else version
        if self.server is None:
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        failures: list[BaseException] = []

        def receive() -> None:
            try:
                self.client.update_weights({})
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        try:
            self.server.publish(self._stream)
        except BaseException as error:
            thread.join(self.info.seconds)
            if failures:
                error.add_note(f"the engine's side: {type(failures[0]).__name__}: {failures[0]}")
            raise
        thread.join(self.info.seconds)
        if failures:
            raise failures[0]
        self.client.finish_weight_update(str(self.version))

    def _stream(self, held: Any) -> Iterator[NamedTensor]:
        assert self.source is not None
        if self.info.delta:
            return self.outbox.stream(self.source, version=self.version, held=held)
        return encode_publish(self.source, version=self.version)

    def shutdown(self) -> None:
        if self.server is not None:
            self.server.close()
