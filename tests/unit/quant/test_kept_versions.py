"""The kept versions of a model: each gives the bits that the weights gave when they were current."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_weights import MOST, VERSIONS
from ranks import run_ranks

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=[(1, "w4a16"), (2, "w4a16"), (2, "fp8")], ids=str)
def reports(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has seen."""
    count, scheme = request.param
    output = tmp_path_factory.mktemp("ranks") / "output"
    run_ranks("kept_weights.py", count, output, scheme)
    return [torch.load(Path(f"{output}.{rank}"), weights_only=False) for rank in range(count)]


def test_a_kept_version_gives_its_own_bits(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        outputs = report["outputs"]
        assert not any(torch.equal(one, other) for one, other in pairwise(outputs))
        for version, output in report["again"].items():
            assert torch.equal(output, outputs[version]), version


def test_the_models_own_weights_come_back(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert torch.equal(report["own"], report["outputs"][-1])
        assert report["same_masters"]
        assert report["same_wire"]


def test_only_the_last_versions_are_kept(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["contained"] == [version >= VERSIONS - MOST for version in range(VERSIONS)]
        assert "0" in report["missing"]
        one, *_, last = report["sizes"]
        assert last == MOST * one
        assert one < report["masters_bytes"] / 2


def test_a_stale_tensor_is_not_kept(reports: list[dict[str, Any]]) -> None:
    """An update has changed the masters, and nothing has quantized them since."""
    for report in reports:
        assert "has changed since its rows were quantized" in report["stale"]
