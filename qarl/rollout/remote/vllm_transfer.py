"""QaRL's publish as a transfer engine of vLLM: `WeightTransferConfig(backend="qarl")`.

QaRL adds its transfer engine to vLLM's registry (vllm/distributed/weight_transfer). vLLM's own transfer engines
load BF16 weights by layerwise reload. QaRL's receives the stream of `qarl.rollout.remote.wire` over TCP
(`qarl.rollout.remote.sockets`), with the same manifest, checksums, versions and deltas as any publish.

    trainer                                           vLLM's worker
    init_weight_transfer_engine(address, token)  ->   makes its receiver from its own config
    start_weight_update()                        ->   marks its weights as stale
    update_weights({})                           ->   connects, receives, checks, writes, answers, waits for the verdict
    finish_weight_update(version)                ->   ends vLLM's update

If a publish fails for one worker, it fails for all workers (`qarl.rollout.remote.sockets`), and the trainer gets the
reason in their answers. vLLM's interface has four gaps:

- vLLM never asks a transfer engine whether the weights are complete. So after a failed publish, and with dummy weights
  before the first, QaRL's engine makes the model's LogitsProcessor raise, until a publish is complete. This layer runs
  before every sampled token, and outside of CUDA graphs. The error ends vLLM's engine core, but only if a request comes
  before the trainer publishes again. Before the trainer has connected, an engine with dummy weights answers, because
  vLLM computes logits with them when it starts.
- vLLM does not support errors of `update_weights` in several workers. If several workers raise, vLLM's executor reads
  only the first error, and takes the other replies for replies to the next call (`MultiprocExecutor.collective_rpc`).
  If one worker raises, vLLM ends the update only there, and the other workers refuse the next `start_weight_update`. So
  with several workers a failed `update_weights` does not raise. The trainer knows about the failure from the answers,
  and ends the update with `finish_weight_update`.
- `finish_weight_update` does not reset the prefix cache, and `send_weights` cannot do so. The client must.
- A transfer engine gets the model but not the model runner. So it finds the KV caches, which must be set to zero after
  NaN, in the attention layers.

`update_weights` is overridden because the base class synchronizes an accelerator, which a CPU lacks.

The older supported release cannot run this engine (`qarl.vllm_versions.transfer_factories`).
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from qarl.errors import UserError
from qarl.quant.experts import stacked
from qarl.rollout.publish.manifest import NamedTensor, engines_manifest
from qarl.rollout.publish.transaction import EngineWeights
from qarl.rollout.publish.version import checked_version
from qarl.rollout.remote.receive import StreamReceiver
from qarl.rollout.remote.sockets import DEFAULT_SECONDS, WeightClient, WeightServer, own_address
from qarl.rollout.remote.wire import DeltaSender, encode_publish
from qarl.vllm_versions import check_release, kv_cache_tensors

_log = logging.getLogger("qarl.rollout.vllm_plugin")


@dataclass
class QaRLInitInfo(WeightTransferInitInfo):
    """The trainer's address and port. `token`: the secret of this run. `seconds`: limit of each read and write."""

    host: str
    port: int
    token: str = field(repr=False)
    seconds: float = DEFAULT_SECONDS


@dataclass
class QaRLUpdateInfo(WeightTransferUpdateInfo):
    """Has no fields, because the records in the stream fully describe a publish."""


class QaRLTransferEngine(WeightTransferEngine[QaRLInitInfo, QaRLUpdateInfo]):
    """The receiver in one of vLLM's workers. vLLM creates it after loading the model."""

    init_info_cls = QaRLInitInfo
    update_info_cls = QaRLUpdateInfo
    supports_draft_weight_update = False
    receiver: StreamReceiver | None = None
    info: QaRLInitInfo | None = None
    failed = False
    """Whether the last publish failed."""
    published = False
    """Whether a publish was ever complete."""

    def init_transfer_engine(self, init_info: QaRLInitInfo) -> None:
        """Store the trainer's address. If the trainer was restarted, call this again to replace the address."""
        self.info = init_info
        if self.receiver is None:
            check_release()
            expected = engines_manifest(self.model_config.hf_config, self.model)
            weights = EngineWeights(
                self.model,
                self.vllm_config,
                expected,
                kv_caches=lambda: kv_caches(self.vllm_config),
            )
            self.receiver = StreamReceiver(weights)
            refuse_logits(self.model, self._refusal)

    def start_weight_update(self) -> None:
        self._ready()[0].mark_stale("a publish was announced, but has not come", doubt=False)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception:
            if self.parallel_config.world_size == 1:
                raise
            _log.exception(
                "the publish failed; this engine generates nothing until the next one is complete"
            )
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: QaRLUpdateInfo) -> None:
        """Receive one publish. After an error the model refuses to compute logits until a publish is complete."""
        receiver, info = self._ready()
        self.failed = True
        largest = max(spec.nbytes for spec in receiver.weights.expected.values())
        address = info.host, info.port
        options: dict[str, Any] = {"seconds": info.seconds, "limit": largest}
        with WeightClient(
            address, info.token, fingerprint=receiver.fingerprint, **options
        ) as client:
            client.feed(receiver)
        self.failed = False
        self.published = True

    def finish_weight_update(self) -> None:
        """Do nothing. The trainer already knows the result, and an error here would leave vLLM's update open."""

    def _refusal(self) -> UserError | None:
        dummy = self.vllm_config.load_config.load_format == "dummy"
        if self.receiver is None or not (self.failed or (dummy and not self.published)):
            return None
        reason = "its last publish failed" if self.failed else "nothing was published to it"
        return UserError(
            f"this engine does not generate, because {reason}",
            why=self.receiver.stale_because
            if self.failed
            else "load_format=dummy: its weights are random numbers",
            fix="publish before you generate: send_weights in the trainer",
        )

    def shutdown(self) -> None:
        self.receiver = None

    def _ready(self) -> tuple[StreamReceiver, QaRLInitInfo]:
        if self.receiver is None or self.info is None:
            raise UserError(
                "the engine does not know where the trainer is",
                fix="call WeightTransferTrainerFactory.trainer_init first; after a restart of the engine, connect()",
            )
        return self.receiver, self.info


def refuse_logits(model: nn.Module, refusal: Callable[[], UserError | None]) -> None:
    """Make the model raise before it computes logits, if `refusal()` returns an error."""

    def check(*_: Any) -> None:
        if (error := refusal()) is not None:
            raise error

    for module in model.modules():
        if isinstance(module, LogitsProcessor):
            module.register_forward_pre_hook(check)


def kv_caches(vllm_config: Any) -> list[torch.Tensor]:
    """Return the KV caches of the attention layers of a worker."""
    caches: list[torch.Tensor] = []
    for layer in vllm_config.compilation_config.static_forward_context.values():
        caches += kv_cache_tensors(getattr(layer, "kv_cache", None))
    return caches


@dataclass
class QaRLTrainerInitInfo(TrainerInitInfo):
    """Settings of the trainer's side.

    workers   number of workers of all engines; each worker receives all tensors
    delta     whether to send only changes if possible
    host      address of this host that the engines can reach; by default `own_address` chooses it
    token     a secret of this run; the engines get it by `init_weight_transfer_engine`
    """

    backend: ClassVar[str] = "qarl"

    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    workers: int = 1
    host: str | None = None
    delta: bool = True
    seconds: float = DEFAULT_SECONDS


class PackedSource(WeightSource):
    """The tensors to publish, made by `tensors()` for each publish, for example `policy.published_tensors`."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors()
        ]

    def __iter__(self) -> Iterator[NamedTensor]:
        return iter(self._tensors())


class QaRLTrainerTransfer(TrainerWeightTransferEngine[QaRLTrainerInitInfo]):
    """The trainer's side. `sender`: the last publish and its metrics.

    Only the first rank sends. On the other ranks, `send_weights` only iterates over the source, because all ranks must
    take part in its gathers."""

    init_info_cls = QaRLTrainerInitInfo

    def __init__(
        self,
        init_info: QaRLTrainerInitInfo,
        *,
        client: Any,
        source: Iterable[NamedTensor] | None = None,
    ) -> None:
        # vLLM declares its protocol WeightSource. QaRL reads any iterable of named tensors.
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)  # type: ignore[arg-type]
        self.info, self.sender, self.version = init_info, DeltaSender(), 0
        self.server: WeightServer | None = None
        if self.is_sender:
            url = getattr(client, "base_url", None)  # of vLLM's client for HTTP
            host = init_info.host or own_address(
                urlsplit(url).hostname if isinstance(url, str) else None
            )
            self.server = WeightServer(
                init_info.token, host=host, receivers=init_info.workers, seconds=init_info.seconds
            )
            self.connect()

    @classmethod
    def trainer_init(
        cls, init_info: QaRLTrainerInitInfo, *, client: Any, source: Any = None
    ) -> QaRLTrainerTransfer:
        return cls(init_info, client=client, source=source)

    def connect(self) -> None:
        """Tell the engine where the trainer listens. If the engine was restarted, call this again."""
        if self.server is not None:
            host, port = self.server.address
            self.client.init_weight_transfer_engine(
                {"host": host, "port": port, "token": self.info.token, "seconds": self.info.seconds}
            )

    def send_weights(self, version: int | None = None) -> None:
        """Publish the source's tensors. `version`: by default the last version plus 1.

        Raises:
            UserError: `version` is not a whole number from 0.
            PeerLost: a worker was lost. Restart the engine, call `connect`, and publish again.
            TransferFailed: a worker refused the publish. Publish again. No engine generates before that.
            Exception: the client raised it.
        """
        assert self.source is not None, "pass a source to trainer_init"
        self.version = self.version + 1 if version is None else checked_version(version)
        if self.server is None:
            for _ in self.source:
                pass
            return
        source = iter(self.source)
        try:
            self._publish(source)
        except BaseException:
            with suppress(Exception):  # the first error is the one to see
                for _ in source:  # the other ranks still gather each tensor together with this one
                    pass
            raise

    def _publish(self, source: Iterator[NamedTensor]) -> None:
        assert self.server is not None
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
            self.server.publish(lambda receivers: self._stream(source, receivers))
        except BaseException as error:
            thread.join(self.info.seconds)
            if failures:
                error.add_note(f"the engine's side: {type(failures[0]).__name__}: {failures[0]}")
            if not thread.is_alive():
                with suppress(
                    Exception
                ):  # if the update stayed open, vLLM would refuse to start the next one
                    self.client.finish_weight_update(None)
            raise
        thread.join(self.info.seconds)
        if failures:
            raise failures[0]
        self.client.finish_weight_update(str(self.version))

    def _stream(self, source: Iterator[NamedTensor], receivers: Any) -> Iterator[NamedTensor]:
        tensors = stacked(source)  # a program may send the matrices of a checkpoint
        if self.info.delta:
            return self.sender.stream(tensors, version=self.version, receivers=receivers)
        return encode_publish(tensors, version=self.version)

    def shutdown(self) -> None:
        if self.server is not None:
            self.server.close()
