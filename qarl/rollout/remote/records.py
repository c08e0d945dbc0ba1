"""The records of a publish to another process, which stand between its tensors (`qarl.rollout.remote.wire`).

A record is a tensor too, so any transport that keeps the order of named tensors can carry it. Several records of a
stream have the same name, so a transport that puts tensors into a dict by name needs other names
(`qarl.rollout.remote.wire.numbered`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from qarl.errors import UserError
from qarl.rollout.publish.manifest import NamedTensor

PREFIX = "qarl."
BEGIN = "qarl.begin"
UNIT = "qarl.unit"
COMMIT = "qarl.commit"


RETRY = (
    "publish all tensors once more: in your own program call send_weights again; with backend=verl run the same "
    "command again"
)
"""The end of the advice in errors of a publish that failed on its way. verl's driver, which knows the checkpoints, adds
what the command will do (`qarl.verl.failures`)."""


class TransferFailed(UserError):
    """The received data differs from the sent data. Publishing again may work."""

    def __init__(
        self, what: str, *, where: str | None = None, why: str | None = None, fix: str = RETRY
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix)


def is_record(name: str) -> bool:
    return name.startswith(PREFIX)


def read_record(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Return the content of a record. Raise TransferFailed if it is damaged."""
    try:
        content: dict[str, Any] = json.loads(tensor.cpu().numpy().tobytes())
    except ValueError as error:
        raise TransferFailed(
            f"the record {name} of a publish cannot be read", why=str(error)
        ) from error
    return content


def record(name: str, content: Mapping[str, Any]) -> NamedTensor:
    """Return a record as a tensor."""
    data = bytearray(json.dumps(content, separators=(",", ":")).encode())
    return name, torch.frombuffer(data, dtype=torch.uint8)


def without_number(name: str) -> str:
    """Return the name that `qarl.rollout.remote.wire.numbered` was given."""
    plain, _, number = name.rpartition("#")
    return plain if number.isdecimal() and is_record(plain) else name


def not_as_sent(unit: str, names: list[str], sent: list[str]) -> TransferFailed:
    """Return the error for a unit whose tensors `names` are not those of its record, `sent`."""
    lost = [name for name in sent if name not in names]
    extra = [name for name in names if name not in sent]
    return TransferFailed(
        f"{unit} did not arrive as it was sent",
        where=f"lost: {lost[:4]}; not sent: {extra[:4]}",
        why="the transport dropped, added or reordered tensors",
    )


def check_digest(name: str, computed: int, sent: int) -> None:
    """Raise TransferFailed if the checksum of a tensor is not that sent."""
    if computed != sent:
        raise TransferFailed(
            f"{name} was damaged on the way to the engine",
            where=f"checksum {computed & (2**64 - 1):016x}, sent as {sent & (2**64 - 1):016x}",
            why="the engine did not receive the bytes that the trainer's forward used",
            fix=f"check the memory of this machine if the error comes back; {RETRY}",
        )
