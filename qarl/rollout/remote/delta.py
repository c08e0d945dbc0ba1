"""Delta publishes: both sides keep the last published tensors, and only the words that changed are sent.

Each sender and each receiver keeps one copy of all published tensors in host memory, in the published format
(`PublishedCache`). vLLM stores weights in a different layout, in which parts of one published word may be in several
places. So the receiver first changes words of its cached tensors, and then writes whole tensors into vLLM.

A fingerprint identifies the cached tensors. It is a hash of the publish's version and the checksums of all tensors. A
delta publish contains the fingerprint of the tensors that it changes. If a receiver's fingerprint is different, the
receiver refuses the publish before it writes anything. During a publish, and after a failed one, a receiver has no
fingerprint.

A word is one element, read as an integer of the same size. So NaNs and signed zeros are compared bit by bit. The
changes of a tensor are encoded in one uint8 tensor, the payload. It has three parts:

    header      two int64: the coding of the positions, and the number of changed words
    values      the new words, padded to 8 bytes
    positions   the ascending positions of these words, in the smallest of three codings

The codings are:

    0  mask         one bit per word of the tensor
    1  8-bit gaps   the number of unchanged words before each changed word
    2  16-bit gaps  the same in 16 bits

A gap of 255 (or 65535) or more is split: each number 255 (or 65535) counts this many unchanged words, and the next
number continues the gap.

16-bit gaps are smallest if less than about 0.4% of the words changed, and a mask if more than 12% did. verl's delta
engine (verl/checkpoint_engine/delta_sync) sends four bytes per position.

Values are absolute, so applying a payload twice does no harm. A payload does not say which tensor it is for. So the
receiver then compares the checksum of the whole tensor (`qarl.rollout.remote.receive`).

`qarl.rollout.remote.wire` sends changes (`send_changes`), and `apply_changes_of` applies them at the receiver.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qarl.rollout.publish.manifest import NamedTensor
from qarl.rollout.remote.records import TransferFailed, not_as_sent

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HEADER = 16
_MASK = 0
_GAPS = {1: torch.uint8, 2: torch.int16}
"""Coding -> dtype of a gap. The number of the coding is the number of bytes of a gap."""


@dataclass(frozen=True)
class Compared:
    """Two versions of a tensor, compared in groups of eight bytes, or word by word.

    `old`, `new`: their words. `differs`: bool, for each group. `count`: how many differ, 0-d int64 on their device."""

    old: Tensor
    new: Tensor
    differs: Tensor
    count: Tensor


def compare(before: Tensor, now: Tensor) -> Compared:
    """Compare two contiguous tensors of one dtype and shape bit by bit. They must be on one device, for which this does
    not wait."""
    old = _words(before)
    new = _words(now)
    whole = now.nbytes % 8 == 0 and all(
        t.storage_offset() * t.itemsize % 8 == 0 for t in (old, new)
    )
    groups = [words.view(torch.int64) if whole else words for words in (old, new)]
    differs = groups[0] != groups[1]
    return Compared(old, new, differs, differs.sum())


def find_changes(compared: Compared, count: int) -> tuple[int, Tensor | None]:
    """Return how many words of a tensor have changed, and the payload for `apply_changes`, on the same device. It is
    None if no word has changed, or if it would not be smaller than the tensor. `count`: the number in `compared`."""
    new = compared.new
    total = compared.new.numel()
    if not count:
        return 0, None
    changed = _differing(compared, count)
    is_mask = changed.dtype == torch.bool
    count = int(changed.sum()) if is_mask else changed.numel()
    if _HEADER + count * new.itemsize >= new.nbytes:
        return count, None
    if count * 8 < total or not is_mask:
        changed = changed.nonzero().squeeze(1) if is_mask else changed
        coding, size, coded = _smallest(changed, total)
    else:  # gaps take at least a byte for each changed word, so a mask is smallest
        coding = _MASK
        size = -(-total // 8)
        coded = _to_mask(changed)
    values = new[changed].view(torch.uint8)
    if _HEADER + _padded(values.numel()) + size >= new.nbytes:
        return count, None
    header = torch.tensor([coding, count], device=new.device).view(torch.uint8)
    padding = values.new_zeros(_padded(values.numel()) - values.numel())
    return count, torch.cat((header, values, padding, coded.view(torch.uint8)))


def apply_changes(tensor: Tensor, payload: Tensor) -> None:
    """Write the changed words of `payload` into the contiguous `tensor`, which is on the same device.

    Raises:
        ValueError: the payload is damaged or does not belong to a tensor of this size. The tensor is unchanged.
    """
    words = _words(tensor)
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() < _HEADER:
        raise ValueError(f"a payload of {payload.numel()} bytes has no header")
    coding, count = payload[:_HEADER].clone().view(torch.int64).tolist()
    start = _HEADER + _padded(count * words.itemsize)
    if coding not in (_MASK, *_GAPS) or not 0 < count <= words.numel() or start > payload.numel():
        raise ValueError(
            f"a payload's header says coding {coding} and {count} of {words.numel()} words"
        )
    values = payload[_HEADER : _HEADER + count * words.itemsize].clone().view(words.dtype)
    coded = payload[start:].clone()  # aligned for every type
    positions = (
        _from_mask(coded, words.numel()) if coding == _MASK else _from_symbols(coded, coding)
    )
    if positions.numel() != count or int(positions[-1]) >= words.numel():
        raise ValueError(f"a payload's positions do not fit {count} of {words.numel()} words")
    words[positions] = values


def _words(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(_WORDS[tensor.element_size()])


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _differing(compared: Compared, count: int) -> Tensor:
    """Return the int64 positions of the words that differ, or, if many differ, a bool for every word.

    Groups of eight bytes are compared first, because usually few words differ. Positions are returned only if few
    groups differ, because each position needs eight bytes.
    """
    old = compared.old
    new = compared.new
    differs = compared.differs
    per_group = new.numel() // differs.numel()
    if per_group == 1:
        return differs
    if count * 8 > differs.numel():
        return old != new
    groups = differs.nonzero() * per_group
    candidates = (groups + torch.arange(per_group, device=new.device)).view(-1)
    return candidates[old[candidates] != new[candidates]]


def _smallest(positions: Tensor, total: int) -> tuple[int, int, Tensor]:
    """Encode ascending `positions` (at least one) in the smallest coding. Return (coding, bytes without padding,
    encoded positions)."""
    gaps = positions.diff(prepend=positions.new_full((1,), -1)) - 1
    sizes = {_MASK: -(-total // 8)} | {
        width: width * (positions.numel() + int((gaps // _escape(width)).sum())) for width in _GAPS
    }
    coding = min(sizes, key=lambda code: sizes[code])
    if coding != _MASK:
        return coding, sizes[coding], _to_symbols(gaps, coding)
    differs = torch.zeros(total, dtype=torch.bool, device=positions.device)
    differs[positions] = True
    return coding, sizes[coding], _to_mask(differs)


def _escape(width: int) -> int:
    return (1 << 8 * width) - 1


def _to_symbols(gaps: Tensor, width: int) -> Tensor:
    """Encode gaps in numbers of `width` bytes. A long gap is split, as the module's docstring says."""
    escape = _escape(width)
    escapes = gaps // escape
    ends = (escapes + 1).cumsum(0)
    symbols = gaps.new_full((int(ends[-1]),), escape)
    symbols[ends - 1] = gaps % escape
    return symbols.to(torch.int32).to(_GAPS[width])


def _from_symbols(coded: Tensor, width: int) -> Tensor:
    if coded.numel() % width or not coded.numel():
        return coded.new_empty(0, dtype=torch.int64)
    escape = _escape(width)
    symbols = coded.view(_GAPS[width]).to(torch.int64) & escape
    is_gap = symbols != escape
    return (symbols + is_gap).cumsum(0)[is_gap] - 1


def _to_mask(differs: Tensor) -> Tensor:
    bits = F.pad(differs.to(torch.uint8), (0, _padded(differs.numel()) - differs.numel()))
    return (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(
        1, dtype=torch.uint8
    )


def _from_mask(coded: Tensor, total: int) -> Tensor:
    if coded.numel() != _padded(total) // 8:
        return coded.new_empty(0, dtype=torch.int64)
    bits = coded[:, None] >> torch.arange(8, dtype=torch.uint8, device=coded.device) & 1
    return bits.view(-1).nonzero().squeeze(1)


def fingerprint_of(version: int, digests: Mapping[str, int]) -> str:
    """Return a text that identifies a complete set of tensors by its version and the checksums of all tensors."""
    text = "\n".join([str(version), *(f"{name} {digests[name]}" for name in sorted(digests))])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class PublishedCache:
    """The tensors of the last publish and their checksums by name. `fingerprint` is None unless it was complete."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.digests: dict[str, int] = {}
        self.fingerprint: str | None = None

    def begin(self, *, changes: bool) -> None:
        """Begin a publish. `changes`: true if the publish sends only changes, false if it sends all tensors."""
        self.fingerprint = None
        if not changes:
            self.digests = {}

    def put(self, name: str, tensor: Tensor, digest: int = 0) -> None:
        """Copy `tensor`. If dtype and shape are unchanged, overwrite the earlier tensor of this name."""
        tensor = tensor.detach()
        old = self.tensors.get(name)
        if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
            old.copy_(tensor)
        else:
            self.tensors[name] = tensor.to("cpu", copy=True).contiguous()
        self.digests[name] = digest

    def compare(self, name: str, tensor: Tensor) -> Compared | None:
        """Compare `tensor` with the one of this name, or return None if there is none like it. This does not wait for a
        device."""
        before = self.tensors.get(name)
        if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
            return None
        return compare(before.to(tensor.device, non_blocking=True), tensor.detach().contiguous())

    def take(self, name: str, sent: Tensor, digest: int, *, is_delta: bool) -> None:
        """Store what a delta publish has sent for the tensor `name`: the whole tensor, or a payload of its changes.

        Raises:
            ValueError: the payload is damaged.
        """
        if not is_delta:
            self.put(name, sent, digest)
        else:
            apply_changes(self.tensors[name], sent.cpu())
            self.digests[name] = digest

    def commit(self, version: int, digests: Mapping[str, int] | None = None) -> str:
        """End a complete publish. Return the fingerprint.

        `digests`: the checksums of all tensors, for a publish whose calls of `put` did not know them."""
        if digests is not None:
            self.digests = dict(digests)
        for name in self.tensors.keys() - self.digests.keys():
            del self.tensors[name]
        self.fingerprint = fingerprint_of(version, self.digests)
        return self.fingerprint


@dataclass
class Tally:
    """Counts the `bytes` of a publish, and its changed words by kind: `codes` (quantized weights), `scales`, `other`.

    `known`: whether the publish was compared with the previous one."""

    known: bool = False
    bytes: int = 0
    changed: dict[str, int] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, changed: int) -> None:
        leaf = name.rpartition(".")[2]
        kind = (
            "scales" if leaf == "weight_scale" else "codes" if tensor.dtype in _LOW_BIT else "other"
        )
        if leaf != "weight_shape":
            self.changed[kind] = self.changed.get(kind, 0) + changed
            self.words[kind] = self.words.get(kind, 0) + tensor.numel()

    def count(self, stream: Iterable[NamedTensor]) -> Generator[NamedTensor]:
        """Yield the tensors of `stream`, and count their bytes."""
        for name, tensor in stream:
            self.bytes += tensor.nbytes
            yield name, tensor

    def metrics(self) -> dict[str, float]:
        """Return `publish/changed_words` and the fractions of changed words, or {} if `known` is false."""
        words = sum(self.words.values())
        if not self.known or not words:
            return {}
        changed = sum(self.changed.values())
        names = {"codes": "publish/changed_codes_frac", "scales": "publish/changed_scales_frac"}
        shares = {
            name: self.changed[kind] / self.words[kind]
            for kind, name in names.items()
            if self.words.get(kind)
        }
        return {
            "publish/changed_words": float(changed),
            "publish/changed_frac": changed / words,
        } | shares


_LOW_BIT = (torch.int32, torch.int8, torch.float8_e4m3fn)


def apply_changes_of(
    unit: Mapping[str, Any],
    sent: list[NamedTensor],
    members: Collection[str],
    cache: PublishedCache,
) -> None:
    """Apply to `cache` the tensors that the sender (`send_changes` in wire.py) has yielded before its record, `unit`.

    `members`: names of all tensors of the unit.

    Raises:
        TransferFailed: a tensor was lost or added on the way, or a payload is damaged.
    """
    names = [name for name, _ in sent]
    digests = unit["digests"]
    if names != list(digests):
        raise not_as_sent(unit["unit"], names, list(digests))
    for name, tensor in sent:
        try:
            if name not in members:
                raise ValueError(f"it is not a tensor of {unit['unit']}")
            cache.take(name, tensor, digests[name], is_delta=name in unit["deltas"])
        except ValueError as error:
            raise TransferFailed(
                f"the changes of {name} cannot be applied", why=str(error)
            ) from error
