"""Tests of Triton kernels run on a GPU, or under Triton's interpreter, where tests/integration/kernels/test_triton.py
runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from triton_rig import INTERPRETED

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def new_tensors_hold_garbage() -> Iterator[None]:
    """`torch.empty` is filled with NaN, or the largest integer: what no kernel wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
