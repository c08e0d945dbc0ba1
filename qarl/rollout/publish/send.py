"""The trainer's side of a publish: it makes the stream of `qarl.rollout.publish.wire`.

`publish_weights` publishes to an engine in the same process:

    validate   compare names, dtypes and shapes with the engine's config, and look for NaN and Inf
    transfer   make checksums; the engine's receiver takes the tensors unit by unit and computes them again
    apply      write each unit into vLLM's modules
    commit     compare the checksums, refresh tied layers and clear a corrupt KV cache, then set the version, then reset
               the prefix cache

If any step fails, even the first, the engine is stale, because its weights are not the trainer's current weights.

`DeltaSender` publishes to receivers in other processes. It keeps the tensors that it sent last, as the receivers do,
but does not assume that they arrived. Before each publish it gets the fingerprints of all receivers. If they all equal
its own, it sends only changes. Otherwise it sends all tensors.

Between the first record and the last, neither side waits for its device. The sender looks for NaN and Inf, and the
receiver compares checksums, unit by unit, and both read the results before the last record. For a delta, both read once
for each unit, and again for each tensor that has changed. Tensors that are cached for the next delta are copied to the
host, unit by unit.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from qarl.quant.experts import stacked
from qarl.rollout.publish import wire
from qarl.rollout.publish.checksum import check_unit
from qarl.rollout.publish.delta import PublishedCache, Tally, fingerprint_of, send_changes
from qarl.rollout.publish.wire import NamedTensor, PublishReport, TransferFailed

if TYPE_CHECKING:
    from qarl.rollout.engine import RolloutEngine
    from qarl.rollout.publish.receive import WeightReceiver


def encode_publish(
    tensors: Iterable[NamedTensor],
    *,
    version: int,
    checked: bool = False,
    run: str | None = None,
    keep: bool = False,
    base: PublishedCache | None = None,
    cache: PublishedCache | None = None,
    tally: Tally | None = None,
) -> Iterator[NamedTensor]:
    """Yield `tensors` (checkpoint names, in layer order) with the records of a publish between them.

    Args:
        checked: whether `check_complete` has accepted the tensors. If not, they are checked for NaN and Inf here.
        run: the name of the run that owns the weights, for transports that two runs could share by mistake.
        keep: whether the receiver caches the tensors, so that the next publish can be a delta.
        base: the tensors that the receiver has cached. If given, the publish is a delta, and `keep` must be true.
        cache: the sender's copy of what the receivers cache, which follows the stream. None if it is the receiver's.
        tally: counts the changed words. It is used only with `base`.

    Raises:
        UserError: a tensor contains NaN or Inf. The message names the tensor.
    """
    begin: dict[str, Any] = {"version": version}
    if run is not None:
        begin["run"] = run
    if keep:
        begin |= {"keep": True, "base": base and base.fingerprint}
    tally, units = tally or Tally(), list[tuple[list[str], torch.Tensor]]()
    tally.known = base is not None
    if cache is not None:
        cache.begin(changes=base is not None)
    yield wire.record(wire.BEGIN, begin)
    for unit, group in groupby(stacked(tensors), key=lambda item: wire.unit_of(item[0])):
        members = list(group)
        results = check_unit([tensor for _, tensor in members], finite=not checked)
        units.append(([name for name, _ in members], results))
        if base is not None:
            yield from send_changes(unit, members, results, base, cache, tally)
            continue
        yield from members
        if cache is not None:
            for name, tensor in members:
                cache.put(name, tensor)
        yield wire.UNIT, results[0]
    names = [name for names, _ in units for name in names]
    read = units and (keep or not checked)
    sums, bad = torch.cat([results for _, results in units], 1).tolist() if read else ([], [])
    wire.refuse_nonfinite(names, bad)
    commit: dict[str, Any] = {"version": version}
    if keep:
        digests = dict(zip(names, sums, strict=True))
        commit["fingerprint"] = fingerprint_of(version, digests) if cache is None else cache.commit(version, digests)
    yield wire.record(wire.COMMIT, commit)


class DeltaSender:
    """The last publish of one sender. `cache`: its tensors. `tally`: counts of bytes and changed words."""

    def __init__(self) -> None:
        self.cache = PublishedCache()
        self.tally = Tally()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last publish: `publish/delta`, `publish/mbytes`, and counts of changed words."""
        if not self.tally.bytes:
            return {}
        sent = {"publish/delta": float(self.tally.known), "publish/mbytes": self.tally.bytes / 1e6}
        return sent | self.tally.metrics()

    def stream(
        self, tensors: Iterable[NamedTensor], *, version: int, held: Collection[str | None], **options: Any
    ) -> Iterator[NamedTensor]:
        """Yield the stream of a publish, as `encode_publish` does with `options`.

        `held`: the fingerprint of each receiver, or None for a receiver without a fingerprint."""
        mine = self.cache.fingerprint
        base = self.cache if mine is not None and held and all(theirs == mine for theirs in held) else None
        self.tally = Tally()
        encoded = encode_publish(
            tensors, version=version, keep=True, base=base, cache=self.cache, tally=self.tally, **options
        )
        yield from self.tally.count(encoded)


def publish_weights(
    engine: RolloutEngine, receiver: WeightReceiver, stream: Iterable[NamedTensor], *, version: int, delta: bool = False
) -> PublishReport:
    """Publish as `RolloutEngine.publish` describes. All tensors stay in memory until all are checked. A quantized model
    holds them anyway, so this needs no extra memory.

    `delta`: send only changes if the receiver has cached the tensors of the last complete publish. The sender has no
    copy of its own: it compares each unit with the receiver's cache before the receiver changes it."""
    start, tally = time.perf_counter(), Tally()
    try:
        tensors = list(stream)
        wire.check_complete(tensors, engine.expected)
        tensors = list(stacked(tensors))
        validated = time.perf_counter()
        complete = receiver.cache is not None and receiver.cache.fingerprint is not None
        base = receiver.cache if delta and complete else None
        encoded = encode_publish(tensors, version=version, checked=True, keep=delta, base=base, tally=tally)
        receiver.feed(engine.transport(tally.count(encoded)))
        if receiver.version != version:
            raise TransferFailed(
                "the publish ended before its last record",
                why=f"the engine still waits for the rest of version {version}: {receiver.stale_because}",
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
    return replace(report, sent_bytes=tally.bytes, is_delta=tally.known, changed=tally.metrics())


def _report(
    tensors: Sequence[NamedTensor], expected: wire.Manifest, version: int, seconds: dict[str, float]
) -> PublishReport:
    layers, quantized_bytes, elements = wire.quantized_layers(expected), 0, 0
    for name, tensor in tensors:
        layer, _, leaf = name.rpartition(".")
        if layer not in layers or leaf == "bias":
            continue
        quantized_bytes += tensor.nbytes
        if leaf in ("weight", "weight_packed"):
            elements += tensor.numel() * (8 if leaf == "weight_packed" else 1)
    nbytes = sum(tensor.nbytes for _, tensor in tensors)
    return PublishReport(version, len(tensors), nbytes, quantized_bytes, 2 * elements, seconds)
