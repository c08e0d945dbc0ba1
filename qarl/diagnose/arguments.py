"""The arguments of `qarl diagnose calibrate` that are not keys of the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from qarl.config.command_arguments import read_request

CALIBRATE = "calibrate"
EXAMPLE = "qarl diagnose calibrate config=quickstart.yaml batches=6 share=0.05"


@dataclass(frozen=True, config={"extra": "forbid"})
class CalibrateRequest:
    """`batches`: how many batches are sampled. `share`: the share of responses or tokens that a threshold may lose."""

    batches: Annotated[int, Field(ge=1, le=1000)] = 6
    share: Annotated[float, Field(gt=0, le=0.5)] = 0.05


def calibrate_request(words: Sequence[str]) -> tuple[CalibrateRequest, list[str]]:
    """Return the request, and the words that are the config's. Raise UserError if a value is wrong."""
    names = {field.name for field in fields(CalibrateRequest)}
    of_request = [word for word in words if word.partition("=")[0] in names]
    of_config = [word for word in words if word not in of_request]
    return read_request(CalibrateRequest, of_request, example=EXAMPLE), of_config
