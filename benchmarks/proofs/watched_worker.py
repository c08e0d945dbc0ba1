"""QaRL's worker extension for verl, which also compares what each publish left in the engine with a full publish.

For the proof `verl_delta`. After each publish it appends a line to a file in the folder QARL_WATCH: the version,
the fingerprint of the kept tensors, how many of them no longer have their checksum, and how many parameters and buffers
of the engine change if all kept tensors are published to it through a second receiver.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.proofs.engine_tensors import copied, differ
from qarl.rollout.publish.checksum import checksums
from qarl.rollout.publish.receive import WeightReceiver
from qarl.rollout.publish.send import encode_publish
from qarl.verl.plugin.worker_extension import QaRLWorkerExtension, make_receiver


class WatchedWorker(QaRLWorkerExtension):
    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        super().update_weights_from_ipc(*args, **kwargs)
        receiver: WeightReceiver = self._qarl_receiver
        line: dict[str, Any] = {"version": receiver.version, "held": receiver.held, "delta": receiver._is_delta}
        if receiver.cache:
            line |= self._compared(receiver)
        file = Path(os.environ["QARL_WATCH"]) / f"{os.getpid()}.jsonl"
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")

    def _compared(self, receiver: WeightReceiver) -> dict[str, Any]:
        assert receiver.cache is not None
        tensors, digests = receiver.cache.tensors, receiver.cache.digests
        found = dict(zip(tensors, checksums(tensors.values()), strict=True))
        before = copied(receiver.model)
        if not hasattr(self, "_second"):
            self._second = make_receiver(self.model_runner)
        self._second.feed(encode_publish(tensors.items(), version=receiver.version or 0))
        return {
            "tensors": len(tensors),
            "damaged": sum(found[name] != digests[name] for name in tensors),
            "differ": differ(before, copied(receiver.model)),
            "digests": {name: f"{digest & (2**64 - 1):016x}" for name, digest in digests.items()},
        }
