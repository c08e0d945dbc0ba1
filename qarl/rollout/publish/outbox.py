"""The sender's side of delta publishes to receivers in other processes.

The sender keeps the tensors that it sent last, as the receivers do (`published_cache.py`). It does not assume that they
arrived. Before each publish it gets the fingerprints of all receivers. If they all equal the sender's fingerprint, it
sends only changes. Otherwise it sends all tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from qarl.rollout.publish.published_cache import KeptTensors, Sent, Tally
from qarl.rollout.publish.wire import BEGIN, COMMIT, UNIT, NamedTensor, encode_publish, read_record


class Outbox:
    """The last publish of one sender. `kept`: the tensors. `tally`: counts of changed words. `sent`: count of bytes."""

    def __init__(self) -> None:
        self.kept = KeptTensors()
        self.tally = Tally()
        self.sent = Sent()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last publish: `publish/delta`, `publish/mbytes`, and counts of changed words."""
        if not self.sent.bytes:
            return {}
        sent = {"publish/delta": float(self.tally.known), "publish/mbytes": self.sent.bytes / 1e6}
        return sent | self.tally.metrics()

    def stream(
        self, tensors: Iterable[NamedTensor], *, version: int, held: Collection[str | None], **options: Any
    ) -> Iterator[NamedTensor]:
        """Yield the stream of a publish, as `qarl.rollout.publish.wire.encode_publish` does with `options`.

        `held`: the fingerprint of each receiver, or None for a receiver without a fingerprint."""
        mine = self.kept.fingerprint
        base = self.kept if mine is not None and held and all(one == mine for one in held) else None
        self.tally, self.sent = Tally(), Sent()
        encoded = encode_publish(tensors, version=version, keep=True, base=base, tally=self.tally, **options)
        unit: dict[str, Any] = {}
        for name, tensor in self.sent.count(encoded):
            if name == BEGIN:
                self.kept.begin(changes=base is not None)
            elif name == UNIT:
                self._apply(unit, read_record(name, tensor) if base else _as_sent(unit, tensor))
                unit = {}
            elif name == COMMIT:
                self.kept.commit(version)
            else:
                unit[name] = tensor
            yield name, tensor

    def _apply(self, unit: dict[str, Any], content: dict[str, Any]) -> None:
        for name, digest in content["digests"].items():
            keep = self.kept.change if name in content.get("deltas", ()) else self.kept.put
            keep(name, unit[name], digest)


def _as_sent(unit: dict[str, Any], digests: torch.Tensor) -> dict[str, Any]:
    return {"digests": dict(zip(unit, digests.tolist(), strict=True))}
