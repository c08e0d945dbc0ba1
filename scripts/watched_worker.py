"""QaRL's worker extension for verl, which also compares what each publish left in the engine with a full publish.

For scripts/verl_delta_check.py. After each publish it appends a line to a file in the folder QARL_WATCH: the version,
the fingerprint of the kept tensors, how many of them no longer have their checksum, and how many parameters and buffers
of the engine change if all kept tensors are published to it through a second receiver.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from qarl.rollout.publish.checksum import checksums
from qarl.rollout.publish.receive import WeightReceiver
from qarl.rollout.publish.wire import encode_publish
from qarl.verl.plugin.worker_extension import QaRLWorkerExtension, make_receiver


class WatchedWorker(QaRLWorkerExtension):
    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        super().update_weights_from_ipc(*args, **kwargs)
        receiver: WeightReceiver = self._qarl_receiver
        line: dict[str, Any] = {"version": receiver.version, "held": receiver.held, "delta": receiver._is_delta}
        if receiver.kept:
            line |= self._compared(receiver)
        file = Path(os.environ["QARL_WATCH"]) / f"{os.getpid()}.jsonl"
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")

    def _compared(self, receiver: WeightReceiver) -> dict[str, Any]:
        assert receiver.kept is not None
        tensors, digests = receiver.kept.tensors, receiver.kept.digests
        found = dict(zip(tensors, checksums(tensors.values()), strict=True))
        before = state(receiver.model)
        if not hasattr(self, "_second"):
            self._second = make_receiver(self.model_runner)
        self._second.feed(encode_publish(tensors.items(), version=receiver.version or 0))
        return {
            "tensors": len(tensors),
            "damaged": sum(found[name] != digests[name] for name in tensors),
            "differ": differ(before, state(receiver.model)),
            "digests": {name: f"{digest & (2**64 - 1):016x}" for name, digest in digests.items()},
        }


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of everything in the engine's model that has a name."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> int:
    """Return the number of tensors that are not equal byte for byte."""

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    return len(a.keys() ^ b.keys()) + sum(not torch.equal(raw(a[name]), raw(b[name])) for name in a.keys() & b.keys())
