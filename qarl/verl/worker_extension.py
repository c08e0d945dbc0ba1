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

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from qarl.errors import UserError
from qarl.process import allow_matrix_tiles
from qarl.rollout.adapter_spec import servable, spec_of_worker, use_vllms_loader
from qarl.rollout.chosen_kernel import own_kernels
from qarl.rollout.kernel_request import request_of
from qarl.rollout.publish.adapters import EngineAdapter
from qarl.rollout.publish.manifest import engines_manifest
from qarl.rollout.publish.transaction import EngineWeights
from qarl.rollout.remote.receive import Inbox, StreamReceiver
from qarl.rollout.vllm_plugin import check_linears_loaded
from qarl.rollout.vllm_plugin.own_linears import check_in_use
from qarl.schemes import UNQUANTIZED, from_quantization_config
from qarl.verl.ask_servers import RESUME
from qarl.verl.publication import (
    TIMEOUT_VARIABLE,
    publish_timeout,
    refuse_other_run,
    run_identity,
    socket_timeouts,
)
from qarl.vllm_versions import check_release

_contexts = ExitStack()
"""Contexts in which this process's engine is built. They last as long as the process."""


class QaRLWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension with QaRL's `update_weights_from_ipc`. vLLM adds this class to the bases of its worker class."""

    model_runner: Any
    device: Any
    _qarl_receiver: StreamReceiver | None = None

    def __new__(cls, **kwargs: Any) -> Any:
        allow_matrix_tiles()  # before vLLM loads and warms up the model
        worker = super().__new__(cls, **kwargs)
        config = kwargs.get("vllm_config")
        if config is not None and config.lora_config is not None:
            _serve_adapters(config)
        request = request_of(config)
        if request is not None:
            check_linears_loaded(request.kernels)
            _contexts.enter_context(own_kernels(request))
        return worker

    def qarl_adapter(self) -> tuple[str, int] | str:
        """Return name and id of the adapter to generate with, or why there is none."""
        receiver = self._qarl_receiver
        if receiver is None or receiver.adapter is None:
            return "nothing has been published to it yet"
        try:
            receiver.adapter.check_present()
        except UserError as error:
            return str(error.why)
        if receiver.stale:
            return receiver.stale_because
        return receiver.adapter.request.lora_name, receiver.adapter.request.lora_int_id

    def qarl_has_base(self) -> bool:
        """Return whether a publish of weights is complete."""
        return self._qarl_receiver is not None and not self._qarl_receiver.weights.stale

    def update_weights_from_ipc(
        self,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
    ) -> None:
        if self.device is None:
            self.device = torch.device(self.model_runner.device)
        run = run_identity()
        seconds = publish_timeout()
        inbox = Inbox()
        with inbox.keeping_failure():
            if self._qarl_receiver is None:
                self._qarl_receiver = make_receiver(self, run)
            _expect_publish(self._qarl_receiver)
            inbox.receiver = self._qarl_receiver
        buckets = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm
        )
        try:
            with socket_timeouts(seconds):
                buckets.receive_weights(on_bucket_received=inbox.take)
        except zmq.Again as error:
            what = f"the engine received no weights from the trainer for {seconds:g} s"
            why = "the process that sends them has died or is stuck, or it sends to another run's engine"
            fix = f"raise {TIMEOUT_VARIABLE}, the limit in seconds, if the model's tensors take longer; then {RESUME}"
            raise UserError(what, where=str(buckets.zmq_handle), why=why, fix=fix) from error
        inbox.close()


def _expect_publish(receiver: StreamReceiver) -> None:
    """Make the engine stale, because a publish without any record would leave the last version in use."""
    if receiver.adapter is not None or not receiver.stale:
        receiver.mark_stale("the publish ended before its first record", doubt=False)


def _serve_adapters(vllm_config: Any) -> None:
    """Let this process's engine load adapters."""
    use_vllms_loader()  # verl's extension has replaced it by one that calls a method that vLLM no longer has
    quantization = getattr(vllm_config.model_config.hf_config, "quantization_config", None)
    scheme = from_quantization_config(quantization) if quantization else UNQUANTIZED
    _contexts.enter_context(servable(spec_of_worker(vllm_config), scheme))


def make_receiver(worker: Any, run: str) -> StreamReceiver:
    """Return the receiver of a worker of vLLM's, for publishes of `run`.

    Raise UserError if trainer and engine quantize different layers, or if QaRL does not support this vLLM."""
    check_release()
    runner = worker.model_runner
    expected = engines_manifest(runner.vllm_config.model_config.hf_config, runner.get_model())
    request = request_of(runner.vllm_config)
    if request is not None:
        check_in_use(runner.get_model(), request)
    weights = EngineWeights.of_runner(runner, expected)
    adapter = None
    if runner.vllm_config.lora_config is not None:
        spec = spec_of_worker(runner.vllm_config)
        adapter = EngineAdapter(worker, runner.get_model(), spec)
    # A bucket is a view of a buffer that the next bucket overwrites.
    check_begin = partial(refuse_other_run, run=run)
    return StreamReceiver(weights, adapter, clone=True, check_begin=check_begin)
