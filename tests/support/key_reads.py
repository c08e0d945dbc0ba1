"""Which files of the package read which keys of the config, and a rollout engine that only answers."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT

from qarl.config import Config, describe_keys
from qarl.config.schema import sections
from qarl.config.types import Section
from qarl.rollout.publish.manifest import PublishReport
from qarl.rollout.requests import RolloutBatch

PACKAGE = f"{ROOT / 'qarl'}/"
KINDS = sections() | {"": Config}


def leaves() -> set[str]:
    """The keys of the config that hold values."""
    keys = describe_keys()
    return {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}


@contextmanager
def traced() -> Iterator[dict[str, set[str]]]:
    """Record dotted key -> files below qarl/ that read it, from now on."""
    reads: dict[str, set[str]] = defaultdict(set)

    def read(self: Any, name: str) -> Any:
        if name in type(self).model_fields:
            file = sys._getframe(1).f_code.co_filename
            for section, kind in KINDS.items():
                # The settings of an objective inherit keys of the section actor.
                if file.startswith(PACKAGE) and any(
                    name in base.model_fields for base in shared(type(self), kind)
                ):
                    reads[f"{section}.{name}" if section else name].add(file.removeprefix(PACKAGE))
        return object.__getattribute__(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Section, "__getattribute__", read, raising=False)
        yield reads


def shared(first: type[Section], other: type[Section]) -> list[type[Section]]:
    """The sections from which both inherit, themselves too."""
    sections = (base for base in first.__mro__ if issubclass(base, Section) and base is not Section)
    return [section for section in sections if section in other.__mro__]


class AnsweringEngine:
    """In the place of `RolloutEngine`: each response is three tokens, with log-probs that nobody computed."""

    stale, weight_version, has_weights = False, -1, False
    weights = SimpleNamespace(storage=dict)
    rebuilds = 0

    def __init__(self, config: Any) -> None:
        self.config = config

    def __enter__(self) -> AnsweringEngine:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def publish_from(self, source: Any, *, version: int) -> PublishReport:
        report: PublishReport = source(self, version=version)
        return report

    def publish(self, tensors: Any, *, version: int, prepared: Any = None) -> PublishReport:
        assert sum(1 for _ in tensors)
        self.weight_version = version
        return PublishReport(0, 1, 1000, 0, 0, {})

    def publish_adapter(self, adapter: Any, *, version: int) -> PublishReport:
        self.weight_version, self.has_weights = version, True
        return PublishReport(0, 1, adapter.nbytes, 0, 0, {})

    def sleep(self) -> None:
        return None

    def generate(
        self, prompts: list[list[int]], sampling: Any, seeds: list[int] | None = None, **_: Any
    ) -> RolloutBatch:
        rows = [[3 + i % 50, 4, 1] for i in range(len(prompts))]
        return RolloutBatch(
            prompts, rows, [[-4.0] * 3 for _ in rows], ["stop"] * len(rows), self.weight_version
        )
