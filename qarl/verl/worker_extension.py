"""Receives published weights in vLLM's workers under verl. The weights arrive already quantized, in checkpoint format.
QaRL's receiver loads them one decoder layer at a time (`qarl.rollout.remote.receive`).

verl's own extension passes each bucket of weights to `load_weights`. This fails for layers whose parameters vLLM has
repacked, which are all quantized layers, and on CPU all linears. The key
`actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls` chooses the class of this module.

After an error the worker still receives all buckets before it raises. Otherwise the trainer would wait for the
acknowledgement of the next bucket until its time limit.

In an engine with adapters, a publish is a stream of the base, of an adapter, or of both, one after the other.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from qarl.errors import UserError
from qarl.process import allow_matrix_tiles
from qarl.rollout.adapters import (
    AdapterReceiver,
    AdapterSpec,
    EngineAdapter,
    no_place,
    servable,
    use_vllms_loader,
)
from qarl.rollout.publish.manifest import NamedTensor, engines_manifest
from qarl.rollout.remote.receive import WeightReceiver
from qarl.rollout.remote.wire import BEGIN, read_record
from qarl.schemes import from_quantization_config
from qarl.verl.ask_servers import RESUME
from qarl.verl.publish import (
    TIMEOUT_VARIABLE,
    decode,
    publish_timeout,
    run_identity,
    socket_timeouts,
)
from qarl.vllm_versions import check_release

_served = ExitStack()
"""Contexts in which this process's engine is built. They last as long as the process."""


class QaRLWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension with QaRL's `update_weights_from_ipc`. vLLM adds this class to the bases of its worker class."""

    model_runner: Any
    device: Any
    _qarl_receiver: WeightReceiver
    _qarl_adapter_receiver: AdapterReceiver | None = None
    _qarl_takes_adapter: bool = False
    """Whether the stream that arrives now is of an adapter."""

    def __new__(cls, **kwargs: Any) -> Any:
        allow_matrix_tiles()  # before vLLM loads and warms up the model
        worker = super().__new__(cls, **kwargs)
        config = kwargs.get("vllm_config")
        if config is not None and config.lora_config is not None:
            _serve_adapters(config)
        return worker

    def qarl_adapter(self) -> tuple[str, int] | str:
        """Return name and id of the adapter to generate with, or why there is none."""
        receiver = self._qarl_adapter_receiver
        if receiver is None:
            return "nothing has been published to it yet"
        try:
            receiver.target.check_present()
        except UserError as error:
            return str(error.why)
        if receiver.stale:
            return receiver.stale_because
        return receiver.target.request.lora_name, receiver.target.request.lora_int_id

    def qarl_has_base(self) -> bool:
        """Return whether a publish of weights is complete."""
        return hasattr(self, "_qarl_receiver") and not self._qarl_receiver.stale

    def _qarl_make_receivers(self) -> None:
        self._qarl_receiver = make_receiver(self.model_runner)
        if (config := self.model_runner.vllm_config.lora_config) is not None:
            spec = AdapterSpec(config.max_lora_rank, tuple(config.target_modules or ()))
            target = EngineAdapter(self, self.model_runner.get_model(), spec)
            self._qarl_adapter_receiver = AdapterReceiver(target, self._qarl_receiver)

    def _qarl_is_of_adapter(self, item: NamedTensor) -> bool:
        """Return whether the adapter's receiver takes `item`, the next one of a stream."""
        if item[0] == BEGIN:
            self._qarl_takes_adapter = "adapter" in read_record(*item)
            if not self._qarl_takes_adapter and self._qarl_adapter_receiver is not None:
                self._qarl_adapter_receiver.target.acts = False  # of another base
        return self._qarl_takes_adapter

    def update_weights_from_ipc(
        self,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
    ) -> None:
        if self.device is None:
            self.device = torch.device(self.model_runner.device)
        failure: list[BaseException] = []
        run = run_identity()
        seconds = publish_timeout()

        @contextmanager
        def noted() -> Iterator[None]:
            try:
                yield
            except BaseException as error:
                _traceback_as_text(error)
                failure.append(error)

        def take(weights: list[NamedTensor], is_last: bool) -> None:
            if not failure:
                with noted():
                    for is_adapter, part in groupby(
                        decode(weights, run=run), self._qarl_is_of_adapter
                    ):
                        receiver = (
                            self._qarl_adapter_receiver if is_adapter else self._qarl_receiver
                        )
                        if receiver is None:
                            fix = "leave actor_rollout_ref.rollout.engine_kwargs.vllm.enable_lora to QaRL"
                            raise no_place("it was started without adapters", fix)
                        receiver.feed(part)

        with noted():
            if not hasattr(self, "_qarl_receiver"):
                self._qarl_make_receivers()
            unread = "the publish ended before its first record"  # an empty one would leave the last version in use
            if self._qarl_adapter_receiver is not None:
                self._qarl_adapter_receiver.mark_stale(unread)
            elif not self._qarl_receiver.stale:
                self._qarl_receiver.mark_stale(unread, doubt=False)
        buckets = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm
        )
        try:
            with socket_timeouts(seconds):
                buckets.receive_weights(on_bucket_received=take)
        except zmq.Again as error:
            what = f"the engine received no weights from the trainer for {seconds:g} s"
            why = "the process that sends them has died or is stuck, or it sends to another run's engine"
            fix = f"{RESUME}; if the model's tensors take longer, raise {TIMEOUT_VARIABLE}, the limit in seconds"
            raise UserError(what, where=str(buckets.zmq_handle), why=why, fix=fix) from error
        if not failure and (published := self._qarl_adapter_receiver or self._qarl_receiver).stale:
            failure.append(RuntimeError(published.stale_because))
        if failure:
            raise failure[0]


def _traceback_as_text(error: BaseException) -> None:
    """Replace the traceback of `error` with a note. Variables in its frames would keep the bucket alive, so verl's
    receiver could not close its shared memory."""
    error.add_note("".join(traceback.format_exception(error)))
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


def _serve_adapters(vllm_config: Any) -> None:
    """Let this process's engine load adapters."""
    use_vllms_loader()  # verl's extension has replaced it by one that calls a method that vLLM 0.29 does not have
    quantization = getattr(vllm_config.model_config.hf_config, "quantization_config", None)
    scheme = from_quantization_config(quantization).name if quantization else "bf16"
    config = vllm_config.lora_config
    _served.enter_context(
        servable(AdapterSpec(config.max_lora_rank, tuple(config.target_modules or ())), scheme)
    )


def make_receiver(model_runner: Any) -> WeightReceiver:
    """Return the receiver for one worker's model.

    Raise UserError if trainer and engine quantize different layers, or if QaRL does not support this vLLM."""
    check_release()
    expected = engines_manifest(
        model_runner.vllm_config.model_config.hf_config, model_runner.get_model()
    )
    # A bucket is a view of a buffer that the next bucket overwrites.
    return WeightReceiver.of_runner(model_runner, expected, clone=True)
