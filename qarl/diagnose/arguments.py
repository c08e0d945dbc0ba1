"""The arguments of the commands of `qarl diagnose` that are not keys of the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from qarl.config.command_arguments import Commas, read_request


@dataclass(frozen=True, config={"extra": "forbid"})
class CalibrateRequest:
    """`batches`: how many batches are sampled. `share`: the share of responses or tokens that a threshold may lose."""

    batches: Annotated[int, Field(ge=1, le=1000)] = 6
    share: Annotated[float, Field(gt=0, le=0.5)] = 0.05


@dataclass(frozen=True, config={"extra": "forbid"})
class GreedyRequest:
    """`batch_sizes`: how many prompts the engine is given at a time, in turn."""

    batch_sizes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=65536)], ...], Commas, Field(min_length=2)
    ] = (1, 2, 4, 8, 16, 64)


Request = CalibrateRequest | GreedyRequest
REQUESTS: dict[str, type[Request]] = {"calibrate": CalibrateRequest, "greedy": GreedyRequest}
"""Maps the name of a command to its arguments. Its module in this package has the same name, and a function `run`."""
_EXAMPLES = {
    "calibrate": "qarl diagnose calibrate config=quickstart.yaml batches=6 share=0.05",
    "greedy": "qarl diagnose greedy config=quickstart.yaml batch_sizes=1,8,64",
}


def request_of(command: str, words: Sequence[str]) -> tuple[Request, list[str]]:
    """Return the request, and the words that are the config's. Raise UserError if a value is wrong."""
    kind = REQUESTS[command]
    names = {field.name for field in fields(kind)}
    of_request = [word for word in words if word.partition("=")[0] in names]
    of_config = [word for word in words if word not in of_request]
    return read_request(kind, of_request, example=_EXAMPLES[command]), of_config
