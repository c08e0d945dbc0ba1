"""The built-in rewards read answers and ground truths as people write them, and never reward a wrong one for it."""

import pytest

from qarl.data.rewards import arithmetic, math_verify

NUMBERS = {  # ground truth: right responses
    "72": (
        "72",
        "072",
        "72.0",
        "$72",
        "It is 72.",
        "#### 72",
        "\\boxed{72}",
        "<answer>72</answer>",
        "**72**",
        "=72 cm",
    ),
    "1000": ("1,000", "$1,000", "\\$1,000.00", "1000.", "so 1,000 apples", "10,1,000.00 1,000"),
    "1,000": ("1000", "1,000"),
    "$1,000": ("1000", "1,000"),
    "1,234,567": ("1234567", "1,234,567."),
    "She has 9 + 63 = 72 clips.\n#### 72": ("72", "#### 72", "The answer is 72"),
    "#### 1,000": ("1000",),
    "\\boxed{5}": ("5", "\\boxed{5}"),
    "We add 2 and 3, so $x = \\boxed{5}$.": ("5",),
    "72.0": ("72", "72.00"),
    "72.": ("72",),
    "$72$": ("72",),
    "0.5": ("0.5", ".5", "0.50"),
    "72.05": ("72.05", "72.050"),
    ".5": ("0.5",),
    "-3": ("-3", "= -3", "\u22123", "x=-3", "$-3$", "-3.0"),
    "\u22123": ("-3",),
    "-1,000": ("-$1,000", "-1000", "\u2212\\$1,000"),
    "3": ("5-3", "5\u22123", "(5)-3", "x]-3", "+3"),
    "100": ("1,2,3,100", "1, 100", "99,100.5, 100"),
    "0": ("-0", "0.0", "000"),
    "42 ": ("42",),
}
NO_NUMBERS = {  # ground truth: wrong responses
    "72": (
        "7",
        "720",
        "72.5",
        "-72",
        "172",
        "72,000",
        "1,072",
        "7 2",
        "70+2",
        "0.72",
        ".72",
        "72e1x5",
    ),
    "1000": ("1,00", "1,0000", "1, 000", "1.000", "1000,5", "-1,000", "-$1,000"),
    "000": ("1,000",),
    "5": (".5", "0.5", "x = -5", "-$5"),
    "0.5": ("0.05", ".05", "0.005", "5"),
    "72.05": ("72.5", "72.005", "725"),
    "-3": ("5-3", "3", "(5)-3", "5\u22123"),
    "A": ("A", "(A)"),
    "5-3": ("5-3", "3", "2"),
    "3 apples": ("3 apples",),
    "": ("", "0"),
    "2024-01-01": ("2024-01-01", "01"),
    "#### ": ("", "0"),
}


@pytest.mark.parametrize("truth", NUMBERS)
def test_numbers_as_people_write_them(truth: str) -> None:
    assert [said for said in NUMBERS[truth] if arithmetic("sums", said, truth) != 1.0] == []


@pytest.mark.parametrize("truth", NO_NUMBERS)
def test_other_numbers(truth: str) -> None:
    assert [said for said in NO_NUMBERS[truth] if arithmetic("sums", said, truth) != 0.0] == []


@pytest.mark.parametrize(
    ("truth", "said"),
    [(72, "72"), (72.0, "72"), (-5, "-5"), (0.5, "0.5"), (10**30, "1" + "0" * 30)],
)
def test_ground_truths_that_are_numbers(truth: float, said: str) -> None:
    assert arithmetic("sums", said, truth) == 1.0 and arithmetic("sums", said + "1", truth) == 0.0


ANSWERS = {
    "A": (
        "A", "(A)", "A.", "The answer is A.", "the answer is (A)", "Answer: (A)", "**Answer: A**", "Answer: (A) 5 cm",
        "\\boxed{A}", "\\boxed{(A)}", "\\boxed{\\text{A}}", "#### A", "<answer>A</answer>", "$A$", "Not (B). Answer: A",
    ),
    "(A)": ("A", "\\boxed{A}", "The answer is A"),
    "\\text{A}": ("A", "(A)", "\\boxed{A}"),
    "1,000": ("1000", "\\boxed{1000}", "$1,000", "The answer is 1,000."),
    "72": ("\\boxed{72.0}", "72.0", "#### 72", "<answer>72</answer>"),
    "She has 9 + 63 = 72 clips.\n#### 72": ("72", "\\boxed{72}", "#### 72"),
    "\\boxed{5}": ("5", "\\boxed{5}"),
    "Adding gives $x = \\boxed{\\frac{1}{2}}$.": ("\\boxed{0.5}", "1/2"),
    "72%": ("The answer is 72%", "\\boxed{72\\%}", "72%"),
    "72\\%": ("The answer is 72%", "\\boxed{72\\%}", "72%"),
    "-3": ("\u22123", "The answer is \u22123.", "\\boxed{-3}"),
    "-x": ("The answer is \u2212x",),
    "1 < x < 2": ("\\boxed{(1,2)}",),
    "[1,2]": ("The answer is [1, 2].", "\\boxed{[1,2]}"),
    "\u22123": ("\\boxed{-3}", "-3", "The answer is \u22123."),
    "\\$5": ("\\boxed{5}", "The answer is \\$5"),
    "True": ("The answer is True.", "True"),
}  # fmt: skip
OTHERS = {
    "A": (
        "B", "(B)", "I think a better answer", "A or B", "The answer is A or B", "Answer: (A) or (B)", "\\boxed{B}",
        "The answer is A, no: \\boxed{B}", "Answer: A\nAnswer: B", "<answer>B</answer> A", "An apple", "a",
    ),
    "72": ("\\boxed{73}", "72 \\boxed{73}", "7", "#### 73"),
    "3": ("The answer is 5-3", "\\boxed{-3}"),
    "(1,2)": ("\\boxed{1<x<2}",),  # a pair or an interval; only an inequality as ground truth says which
    "True": ("The answer is not True", "False"),
    "[1,2]": ("The answer is [1,3]", "[1,2] or [2,3]"),
    "": ("", "\\boxed{}"),
    "#### ": ("",),
}  # fmt: skip


@pytest.mark.parametrize("truth", ANSWERS)
def test_answers_as_people_write_them(truth: str) -> None:
    assert [said for said in ANSWERS[truth] if math_verify("math", said, truth) != 1.0] == []


@pytest.mark.parametrize("truth", OTHERS)
def test_other_answers(truth: str) -> None:
    assert [said for said in OTHERS[truth] if math_verify("math", said, truth) != 0.0] == []
