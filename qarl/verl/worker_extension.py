"""Receives published weights in vLLM's workers under verl. The weights arrive already quantized, in checkpoint format.
QaRL's receiver loads them one decoder layer at a time (`qarl.rollout.publish.receive`).

verl's own extension passes each bucket of weights to `load_weights`. This fails for layers whose parameters vLLM has
repacked, which are all quantized layers, and on CPU all linears. The key
`actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls` chooses the class of this module.

After an error the worker still receives all buckets before it raises. Otherwise the trainer would wait for the
acknowledgement of the next bucket until its time limit.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from qarl.errors import UserError
from qarl.process import allow_matrix_tiles
from qarl.rollout.publish.manifest import NamedTensor, engines_manifest
from qarl.rollout.publish.receive import WeightReceiver
from qarl.verl.ask_servers import RESUME
from qarl.verl.publish import TIMEOUT_VARIABLE, decode, publish_timeout, run_identity, socket_timeouts
from qarl.vllm_versions import check_release


class QaRLWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension with QaRL's `update_weights_from_ipc`. vLLM adds this class to the bases of its worker class."""

    model_runner: Any
    device: Any

    def __new__(cls, **kwargs: Any) -> Any:
        allow_matrix_tiles()  # before vLLM loads and warms up the model
        return super().__new__(cls, **kwargs)

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        if self.device is None:
            self.device = torch.device(self.model_runner.device)
        failure: list[BaseException] = []
        run, seconds = run_identity(), publish_timeout()

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
                    self._qarl_receiver.feed(decode(weights, run=run))

        with noted():
            if not hasattr(self, "_qarl_receiver"):
                self._qarl_receiver = make_receiver(self.model_runner)
            if not self._qarl_receiver.stale:  # otherwise an empty publish would leave the last version in use
                self._qarl_receiver.mark_stale("the publish ended before its first record", doubt=False)
        buckets = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        try:
            with socket_timeouts(seconds):
                buckets.receive_weights(on_bucket_received=take)
        except zmq.Again as error:
            what = f"the engine received no weights from the trainer for {seconds:g} s"
            why = "the process that sends them has died or is stuck, or it sends to another run's engine"
            fix = f"{RESUME}; if the model's tensors take longer, raise {TIMEOUT_VARIABLE}, the limit in seconds"
            raise UserError(what, where=str(buckets.zmq_handle), why=why, fix=fix) from error
        if not failure and self._qarl_receiver.stale:
            failure.append(RuntimeError(self._qarl_receiver.stale_because))
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


def make_receiver(model_runner: Any) -> WeightReceiver:
    """Return the receiver for one worker's model.

    Raise UserError if trainer and engine quantize different layers, or if QaRL does not support this vLLM."""
    check_release()
    expected = engines_manifest(model_runner.vllm_config.model_config.hf_config, model_runner.get_model())
    # A bucket is a view of a buffer that the next bucket overwrites.
    return WeightReceiver.of_runner(model_runner, expected, clone=True)
