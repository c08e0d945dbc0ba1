"""Keep the tensors of the last complete publish, so that the next one can send only the words that changed.

Each sender and each receiver keeps one copy of all published tensors in host memory, in the published format. If sender
and receiver are in one process, they share a copy.

vLLM stores weights in a different layout, in which parts of one published word may be in several places. So the
receiver first changes words of its kept tensors, and then writes whole tensors into vLLM.

A fingerprint identifies the kept tensors. It is a hash of the publish's version and the checksums of all tensors. A
delta publish contains the fingerprint of the tensors that it changes. If a receiver's fingerprint is different, the
receiver refuses the publish before it writes anything. During a publish, and after a failed one, a receiver has no
fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from qarl.rollout.publish.delta import Compared, apply_changes, compare, find_changes

NamedTensor = tuple[str, torch.Tensor]


def fingerprint_of(version: int, digests: Mapping[str, int]) -> str:
    """Return a text that identifies a complete set of tensors by its version and the checksums of all tensors."""
    text = "\n".join([str(version), *(f"{name} {digests[name]}" for name in sorted(digests))])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class KeptTensors:
    """Tensors and their checksums by name. `fingerprint` is None unless the last publish was complete."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.digests: dict[str, int] = {}
        self.fingerprint: str | None = None

    def begin(self, *, changes: bool) -> None:
        """Begin a publish. `changes`: true if the publish sends only changes, false if it sends all tensors."""
        self.fingerprint = None
        if not changes:
            self.digests = {}

    def put(self, name: str, tensor: torch.Tensor, digest: int) -> None:
        """Keep a copy of `tensor`. If dtype and shape are unchanged, overwrite the earlier tensor of this name."""
        tensor = tensor.detach()
        kept = self.tensors.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            kept.copy_(tensor)
        else:
            self.tensors[name] = tensor.to("cpu", copy=True).contiguous()
        self.digests[name] = digest

    def change(self, name: str, payload: torch.Tensor, digest: int) -> None:
        """Change words of the kept tensor `name` in place.

        Raises:
            ValueError: the payload is damaged, or there is no tensor of that name.
        """
        if name not in self.digests:
            raise ValueError(f"no tensor {name} is kept")
        apply_changes(self.tensors[name], payload.cpu())
        self.digests[name] = digest

    def commit(self, version: int) -> str:
        """End a complete publish. Return the fingerprint."""
        for name in self.tensors.keys() - self.digests.keys():
            del self.tensors[name]
        self.fingerprint = fingerprint_of(version, self.digests)
        return self.fingerprint


@dataclass
class Tally:
    """Counts the changed words of a publish, by kind: `codes` (quantized weights), `scales`, `other`. `known`: whether
    the publish was compared with the previous one."""

    known: bool = False
    changed: dict[str, int] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, tensor: torch.Tensor, changed: int) -> None:
        leaf = name.rpartition(".")[2]
        kind = "scales" if leaf == "weight_scale" else "codes" if tensor.dtype in _LOW_BIT else "other"
        if leaf != "weight_shape":
            self.changed[kind] = self.changed.get(kind, 0) + changed
            self.words[kind] = self.words.get(kind, 0) + tensor.numel()

    def metrics(self) -> dict[str, float]:
        """Return `publish/changed_words` and the fractions of changed words, or {} if `known` is false."""
        words = sum(self.words.values())
        if not self.known or not words:
            return {}
        changed = sum(self.changed.values())
        names = {"codes": "publish/changed_codes_frac", "scales": "publish/changed_scales_frac"}
        shares = {name: self.changed[kind] / self.words[kind] for kind, name in names.items() if self.words.get(kind)}
        return {"publish/changed_words": float(changed), "publish/changed_frac": changed / words} | shares


_LOW_BIT = (torch.int32, torch.int8, torch.float8_e4m3fn)


class Sent:
    """Counts all bytes of a stream, in the attribute `bytes`."""

    bytes = 0

    def count(self, stream: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield the tensors of `stream`, and count their bytes."""
        for name, tensor in stream:
            self.bytes += tensor.nbytes
            yield name, tensor


def compare_members(members: Iterable[NamedTensor], base: KeptTensors) -> list[Compared | None]:
    """Compare each tensor of a unit with that in `base`, or return None for it if `base` has none like it.

    This does not wait for a device."""
    found: list[Compared | None] = []
    for name, tensor in members:
        now, before = tensor.detach().contiguous(), base.tensors.get(name)
        alike = before is not None and before.shape == now.shape and before.dtype == now.dtype
        found.append(compare(before.to(now.device, non_blocking=True), now) if alike and before is not None else None)
    return found


def changed_members(
    members: Iterable[NamedTensor], compared: Iterable[Compared | None], counts: Iterable[int], tally: Tally
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield (name, tensor to send, whether it is a delta payload) for each tensor that has changed or is new.

    `compared`: of `compare_members`. `counts`: their counts, which the host has read."""
    for (name, tensor), comparison, count in zip(members, compared, counts, strict=True):
        if comparison is None:
            yield name, tensor, False
            continue
        found = find_changes(comparison, count)
        tally.add(name, tensor, found.changed)
        if found.changed:
            yield name, tensor if found.payload is None else found.payload, found.payload is not None
