"""`qarl diagnose greedy`: its arguments, and its comparison by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qarl.diagnose.arguments import request_of
from qarl.diagnose.greedy import Answers, as_text, common_start, differences, report_of, std_at_acc
from qarl.errors import UserError

REFERENCE = Answers(1, [1.0, 0.0, 1.0], [[5, 6, 7], [5], [8, 9]], 2 / 3)
OTHER = Answers(4, [1.0, 1.0, 0.0], [[5, 6, 7], [5, 5, 5], [8, 4]], 2 / 3)


def test_the_arguments() -> None:
    request, rest = request_of("greedy", ["config=a.yaml", "batch_sizes=1,32", "model.dtype=fp16"])
    assert request.batch_sizes == (1, 32) and rest == ["config=a.yaml", "model.dtype=fp16"]
    assert len(request_of("greedy", [])[0].batch_sizes) == 6
    for word in ("batch_sizes=4", "batch_sizes=0,1", "batch_sizes=a,b", "batch_sizes="):
        with pytest.raises(UserError, match="batch_sizes"):
            request_of("greedy", [word])


@pytest.mark.parametrize(
    ("tokens", "others", "common"),
    [([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([1], [1, 2, 3], 1), ([], [4], 0), ([3], [4], 0)],
)
def test_the_common_start_of_two_answers(tokens: list[int], others: list[int], common: int) -> None:
    assert common_start(tokens, others) == common_start(others, tokens) == common


def test_differences_by_hand() -> None:
    """Two answers differ, both from their second token on, and so do their rewards; the accuracy is the same."""
    found = differences(OTHER, REFERENCE)
    assert (found.answers, found.first, found.rewards) == (2, 1, 2)
    none = differences(REFERENCE, REFERENCE)
    assert (none.answers, none.first, none.rewards) == (0, None, 0)


def test_the_deviation_is_that_of_a_sample() -> None:
    assert std_at_acc([0.5, 0.5]) == 0
    assert std_at_acc([0.4, 0.5, 0.6]) == pytest.approx(0.1)


def test_the_text_has_every_batch_size() -> None:
    quant = SimpleNamespace(scheme="w8a8", align="off")
    config = SimpleNamespace(quant=quant, model=SimpleNamespace(dtype="bf16"))
    report = report_of(config, [REFERENCE, OTHER])
    text = as_text(report)
    assert "| 1 | 66.67% | 0 of 3 | 0 |  |" in text
    assert "| 4 | 66.67% | 2 of 3 | 2 | 1 |" in text
    assert "w8a8, bf16, quant.align=off: Std@Acc 0.000% (3 greedy answers of 2 tokens" in text
