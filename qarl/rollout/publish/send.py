"""The trainer's side of a publish to an engine in the same process. It checks all tensors, then passes them to vLLM.

    validate   compare names, dtypes and shapes with the engine's config, and look for NaN and Inf
    transfer   make checksums; the engine's receiver takes the tensors unit by unit and computes them again
    apply      write each unit into vLLM's modules
    commit     compare the checksums, refresh tied layers and clear a corrupt KV cache, then set the version, then reset
               the prefix cache

If any step fails, even the first, the engine is stale, because its weights are not the trainer's current weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from qarl.quant.expert_names import stacked
from qarl.rollout.publish.manifest import Manifest, PublishReport, TensorSpec, check_complete, quantized_layers
from qarl.rollout.publish.published_cache import KeptTensors, Sent, Tally
from qarl.rollout.publish.wire import RETRY, NamedTensor, TransferFailed, encode_publish

if TYPE_CHECKING:
    from qarl.rollout.publish.receive import WeightReceiver


class Engine(Protocol):
    """The part of `RolloutEngine` that a publish needs."""

    expected: Manifest

    def transport(self, stream: Iterator[NamedTensor]) -> Iterator[NamedTensor]: ...

    def reset_prefix_cache(self) -> bool: ...

    def mark_stale(self, reason: str) -> None: ...


def publish_weights(
    engine: Engine, receiver: WeightReceiver, stream: Iterable[NamedTensor], *, version: int, delta: bool = False
) -> PublishReport:
    """Publish as `RolloutEngine.publish` describes. All tensors stay in memory until all are checked. A quantized model
    holds them anyway, so this needs no extra memory.

    `delta`: send only changes if the receiver has kept the tensors of the last complete publish. The sender has no copy
    of its own: it compares each unit with the receiver's kept tensors before the receiver changes them."""
    start, sent, tally = time.perf_counter(), Sent(), Tally()
    try:
        tensors = list(stream)
        check_complete(tensors, engine.expected)
        tensors = list(stacked(tensors))
        manifest = {name: TensorSpec.of(tensor) for name, tensor in tensors}
        validated = time.perf_counter()
        kept = receiver.kept
        base = kept if delta and kept is not None and kept.fingerprint is not None and _fits(kept, manifest) else None
        encoded = encode_publish(
            tensors, version=version, manifest=manifest, checked=True, keep=delta, base=base, tally=tally
        )
        receiver.feed(engine.transport(sent.count(encoded)))
        if receiver.version != version:
            raise TransferFailed(
                "the publish ended before its last record",
                why=f"the engine still waits for the rest of version {version}: {receiver.stale_because}",
                fix=RETRY,
            )
        if not engine.reset_prefix_cache():
            raise RuntimeError("vLLM could not reset its prefix cache: requests are still running")
    except BaseException as error:
        if not receiver.broken or not receiver.stale:
            reason = " ".join(str(error).split())[:300]
            engine.mark_stale(f"the publish of version {version} did not complete: {type(error).__name__}: {reason}")
        raise
    seconds = {"validate": validated - start, **receiver.seconds}
    report = _report(tensors, engine.expected, version, seconds)
    return replace(report, sent_bytes=sent.bytes, is_delta=tally.known, changed=tally.metrics())


def _fits(kept: KeptTensors, manifest: Manifest) -> bool:
    """Return whether exactly the tensors of `manifest` are kept."""
    return kept.tensors.keys() == manifest.keys() and all(
        TensorSpec.of(tensor) == manifest[name] for name, tensor in kept.tensors.items()
    )


def _report(
    tensors: Sequence[NamedTensor], expected: Manifest, version: int, seconds: dict[str, float]
) -> PublishReport:
    layers, quantized_bytes, elements = quantized_layers(expected), 0, 0
    for name, tensor in tensors:
        layer, _, leaf = name.rpartition(".")
        if layer not in layers or leaf == "bias":
            continue
        quantized_bytes += tensor.nbytes
        if leaf in ("weight", "weight_packed"):
            elements += tensor.numel() * (8 if leaf == "weight_packed" else 1)
    nbytes = sum(tensor.nbytes for _, tensor in tensors)
    return PublishReport(version, len(tensors), nbytes, quantized_bytes, 2 * elements, seconds)
