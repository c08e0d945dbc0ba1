"""The wire format of one publish, from trainer to engine: tensors in layer order, with records between them.

    qarl.begin    the version; also name, dtype and shape of every tensor that will follow, if they are known
    tensors       the tensors of one unit: a decoder layer, or a module outside the decoder layers
    qarl.unit     the checksums of the unit's tensors, int64, in their order
    ...           more units
    qarl.commit   the version again; only now is the publish complete

Records are tensors too (all but `qarl.unit` are JSON in uint8). So any transport that keeps the order of named tensors
can carry them, for example verl's buckets or a list in one process. The engine reads them in
`qarl.rollout.publish.receive`.
Both sides hold one unit in memory at a time. A unit contains all parts of a layer that the engine fuses (q/k/v,
gate/up), and its experts as stacks (`qarl.quant.expert_names`).

Between the first record and the last, neither side waits for its device. The sender looks for NaN and Inf, and the
receiver compares checksums, unit by unit, and both read the results before the last record. For a delta, and
for a publish whose tensors are kept, both read once for each unit, and again for each tensor that has changed.

A delta publish changes the tensors of the previous publish (`qarl.rollout.publish.published_cache`). `qarl.begin` then
contains the fingerprint of that publish, `base`, and no list of tensors. A unit contains only changed tensors.
`qarl.unit` is JSON then, with the checksums by name. It lists under `deltas` the tensors that are sent as payloads of
`qarl.rollout.publish.delta`. Checksums are always of whole tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch

from qarl.errors import UserError
from qarl.quant.expert_names import stacked
from qarl.rollout.publish.delta import Compared
from qarl.rollout.publish.manifest import Manifest, TensorSpec
from qarl.rollout.publish.published_cache import (
    KeptTensors,
    NamedTensor,
    Tally,
    changed_members,
    compare_members,
    fingerprint_of,
)
from qarl.rollout.publish.units import Checked, check_unit

PREFIX = "qarl."
BEGIN, UNIT, COMMIT = "qarl.begin", "qarl.unit", "qarl.commit"


RETRY = (
    "publish all tensors once more; backend=local does so by itself; with backend=verl run the same command again, "
    "which resumes from the last checkpoint; in your own program call publish (or send_weights) again"
)
"""The advice in errors of a publish that failed on its way."""


class TransferFailed(UserError):
    """The received data differs from the sent data. Publishing again may work."""


_DECODER_LAYER = re.compile(r"(.*?\.layers\.\d+)\.")


def unit_of(name: str) -> str:
    """Return the decoder layer of the tensor `name`, or its module if it is outside the decoder layers."""
    match = _DECODER_LAYER.match(name)
    return match[1] if match else name.rpartition(".")[0]


def encode_publish(
    tensors: Iterable[NamedTensor],
    *,
    version: int,
    manifest: Manifest | None = None,
    checked: bool = False,
    run: str | None = None,
    keep: bool = False,
    base: KeptTensors | None = None,
    tally: Tally | None = None,
) -> Iterator[NamedTensor]:
    """Yield `tensors` (checkpoint names, in layer order) with the records of a publish between them.

    Args:
        manifest: the specs of all tensors. If given, the engine refuses a missing tensor or a wrong shape before it
            changes any weight. If None, the engine finds the mistake only when it reaches that tensor.
        checked: whether `check_complete` has accepted the tensors. If not, they are checked for NaN and Inf here.
        run: the name of the run that owns the weights, for transports that two runs could share by mistake.
        keep: whether the receiver keeps the tensors, so that the next publish can be a delta.
        base: the tensors that the receiver has kept. If given, the publish is a delta, and `keep` must be true.
        tally: counts the changed words. It is used only with `base`.

    Raises:
        UserError: a tensor contains NaN or Inf. The message names the tensor.
    """
    specs = {name: str(spec) for name, spec in manifest.items()} if manifest is not None and base is None else None
    begin: dict[str, Any] = {"version": version, "tensors": specs} | ({} if run is None else {"run": run})
    if keep:
        begin |= {"keep": True, "base": base and base.fingerprint}
    tally, units = tally or Tally(), list[tuple[list[str], Checked]]()
    tally.known = base is not None
    yield record(BEGIN, begin)
    for unit, group in groupby(stacked(tensors), key=lambda item: unit_of(item[0])):
        members = list(group)
        names = [name for name, _ in members]
        units.append((names, check_unit([tensor for _, tensor in members], finite=not checked)))
        if base is None:
            yield from members
            yield UNIT, units[-1][1].digests
            continue
        compared = compare_members(members, base)
        digests, counts, bad = _read_unit(units[-1][1], compared)
        if bad:
            _refuse_nonfinite(units[-1:])
        found = dict(zip(names, digests, strict=True))
        sent: dict[str, int] = {}
        deltas = []
        for name, tensor, is_delta in changed_members(members, compared, counts, tally):
            sent[name] = found[name]
            deltas += [name] * is_delta
            yield name, tensor
        yield record(UNIT, {"unit": unit, "digests": sent, "deltas": deltas})
    _refuse_nonfinite(units)
    proof = {"fingerprint": fingerprint_of(version, read_digests(units))} if keep else {}
    yield record(COMMIT, {"version": version, **proof})


def _read_unit(checked: Checked, compared: list[Compared | None]) -> tuple[list[int], list[int], bool]:
    """Return the checksums of a unit, the counts of `compared` and whether a tensor contains NaN or Inf.

    The host reads all of it at once."""
    device = checked.digests.device
    counts = [None if one is None else one.count.to(device, non_blocking=True) for one in compared]
    none = torch.zeros((), dtype=torch.int64, device=device)
    bad = none if checked.bad is None else checked.bad.any().to(torch.int64)
    numbers = torch.stack([*(none if one is None else one for one in counts), bad])
    read = torch.cat((checked.digests, numbers)).tolist()
    return read[: len(compared)], read[len(compared) : -1], bool(read[-1])


def read_digests(units: Iterable[tuple[list[str], Checked]]) -> dict[str, int]:
    """Return the checksums of all units by name."""
    named = list(units)
    if not named:
        return {}
    names = [name for names, _ in named for name in names]
    return dict(zip(names, torch.cat([checked.digests for _, checked in named]).tolist(), strict=True))


def is_record(name: str) -> bool:
    return name.startswith(PREFIX)


def read_record(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Return the content of a record. Raise TransferFailed if it is damaged."""
    try:
        content = json.loads(tensor.cpu().numpy().tobytes())
    except (ValueError, RuntimeError) as error:
        raise unreadable(name, f"{type(error).__name__}: {error}") from error
    assert isinstance(content, dict)
    return content


def unreadable(name: str, why: str = "it does not fit the tensors before it") -> TransferFailed:
    return TransferFailed(
        f"the record {name} of a publish cannot be read",
        why=why,
        fix=f"{RETRY}; if the error comes back, the network or the memory of a machine damages the data",
    )


def read_specs(content: Mapping[str, str] | None) -> Manifest | None:
    """Return the manifest of a `qarl.begin` record, or None if the record has none."""
    if content is None:
        return None
    return {name: TensorSpec.parse(text) for name, text in content.items()}


def record(name: str, content: Mapping[str, Any]) -> NamedTensor:
    """Return a record as a tensor."""
    data = bytearray(json.dumps(content, separators=(",", ":")).encode())
    return name, torch.frombuffer(data, dtype=torch.uint8)


def _refuse_nonfinite(units: list[tuple[list[str], Checked]]) -> None:
    flagged = [(names, checked.bad, checked.owners) for names, checked in units if checked.bad is not None]
    if not flagged or not bool(torch.stack([bad.any() for _, bad, _ in flagged]).any()):
        return
    bad = [names[i] for names, flags, owners in flagged if owners is not None for i in owners[flags].unique().tolist()]
    raise UserError(
        f"{len(bad)} tensors to publish hold NaN or Inf",
        where=", ".join(bad[:8]),
        why="the engine would return NaN, and its KV cache would keep the NaN",
        fix="lower optim.lr or actor.grad_clip, or check what the last update did to these weights",
    )
