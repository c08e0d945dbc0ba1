"""Score ground truths as if they were the answers of a model, to find data that the reward can never call right.

A reward compares texts. If it reads the ground truth in another form than the file has, every response scores 0 for
ever, and nothing says so. Here each ground truth is given as the answer, in the forms in which models state answers. It
is right if a form scores more than an empty response does.

A ground truth that is neither text nor a number, such as an object with tests, is no answer, so it is not judged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from qarl.data.answer_forms import stated_truth
from qarl.data.prompts import Prompt
from qarl.data.reward_workers import Reward
from qarl.data.scoring import score_responses
from qarl.errors import UserError, shortened

ROWS = 64
"""Number of rows whose ground truths are judged."""
FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "The answer is {}", "<answer>{}</answer>", "Answer: {}")
"""How models state an answer. The form that was right last is tried first."""
SECONDS = 20.0
"""After this time no further rows are judged, because a slow function, such as a judge, would delay every start."""
_AT_ONCE = 8
_EXAMPLES = 3
_FIXES = {
    "arithmetic": "give numbers as ground truths, such as 72, or choose another function",
    "math_verify": "give numbers, LaTeX or single letters as ground truths, or choose another function",
    "reasoning_gym": "write the data again with another answer_in, such as auto",
}


@dataclass
class Judged:
    """`count`: the number of judged rows. `wrong`: those whose ground truth is not a right answer."""

    count: int = 0
    wrong: list[Prompt] = field(default_factory=list)

    @property
    def mostly_wrong(self) -> bool:
        return 2 * len(self.wrong) > self.count


def judge(
    reward: Reward, prompts: Sequence[Prompt], *, timeout_s: float | None, seconds: float = SECONDS
) -> Judged:
    """Return which of the first `ROWS` ground truths the `reward` accepts as answers.

    `timeout_s`: time limit per response. `seconds`: after this time no further rows are judged. Raise UserError as
    `score_responses` does."""
    rows = [
        prompt for prompt in prompts[:ROWS] if isinstance(prompt.ground_truth, str | int | float)
    ]
    judged = Judged()
    forms = list(FORMS)
    end = time.monotonic() + seconds
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        wrong = _wrong(reward, part, forms, timeout_s, end)
        if wrong is None:
            break
        judged.count += len(part)
        judged.wrong += wrong
    return judged


def _wrong(
    reward: Reward, prompts: Sequence[Prompt], forms: list[str], timeout_s: float | None, end: float
) -> list[Prompt] | None:
    """Return the prompts whose ground truth is right in none of `forms`, or None if that is not known at the time
    `end` (`time.monotonic`). Move a form that is right to the front."""
    if time.monotonic() >= end:
        return None
    least = score_responses(reward, prompts, [""] * len(prompts), timeout_s=timeout_s)
    left = list(zip(prompts, least, strict=True))
    for form in tuple(forms):
        if not left:
            break
        if time.monotonic() >= end:
            return None
        rows = [prompt for prompt, _ in left]
        scores = score_responses(
            reward, rows, [as_answer(row, form) for row in rows], timeout_s=timeout_s
        )
        wrong = [row for row, score in zip(left, scores, strict=True) if score <= row[1]]
        if len(wrong) < len(left):
            forms.remove(form)
            forms.insert(0, form)
        left = wrong
    return [prompt for prompt, _ in left]


def as_answer(prompt: Prompt, form: str) -> str:
    """Return what a model would write whose answer is the prompt's ground truth."""
    text = str(prompt.ground_truth)
    return text if form == "{}" else form.format(stated_truth(text))


def refusal(judged: Judged, function: str, where: str) -> UserError | None:
    """Return the error for ground truths that are mostly wrong, with examples, or None.

    `function`: as in `reward.function`. `where`: the key of the data files."""
    if not judged.mostly_wrong:
        return None
    examples = (
        f"row {prompt.index}: {shortened(prompt.ground_truth, 80)}"
        for prompt in judged.wrong[:_EXAMPLES]
    )
    advice = _FIXES.get(function, "correct them, or the function")
    return UserError(
        f"{len(judged.wrong)} of {judged.count} ground truths are no right answers for the reward function {function} "
        "(reward.check_ground_truths)",
        where=f"reward_model.ground_truth in {where}; {'; '.join(examples)}",
        why="each was given as the response, plain, boxed and in a sentence, and scored no more than an empty response",
        fix=f"{advice}; if they are not meant to be answers, set reward.check_ground_truths=false",
    )
