"""Check that the text that is trained on is what the engine sampled.

Log-probs belong to the sampled tokens. If a loop or a reward strips, completes or replaces text before the update, the
engine's log-probs are for other tokens, and every ratio is wrong. Some agent code does so. The engine therefore keeps a
fingerprint of each prompt and response, and a batch is made only of tokens that still have it.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from qarl.errors import UserError

_WHY = (
    "the engine's log-probs are for the tokens that it sampled; for changed tokens the ratio of trainer to engine has "
    "no meaning, and neither has the update"
)
_FIX = (
    "train on the response as it was sampled; strip, cut or complete text only in a copy, for example inside the "
    "reward function"
)


def fingerprint(prompt: Sequence[int], response: Sequence[int], log_probs: Sequence[float]) -> int:
    """Return a checksum of a prompt's tokens, a response's tokens and their log-probs."""
    lengths = array("q", (len(prompt), len(response), len(log_probs)))
    checksum = zlib.crc32(lengths.tobytes())
    for values in (array("q", prompt), array("q", response), array("d", log_probs)):
        checksum = zlib.crc32(values.tobytes(), checksum)
    return checksum


def refuse_changed(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    sampled: Sequence[int],
) -> None:
    """Raise UserError unless each prompt, response and its log-probs have the fingerprint in `sampled`."""
    if not len(prompts) == len(responses) == len(log_probs) == len(sampled):
        raise _changed(f"{len(responses)} responses, of which {len(sampled)} were sampled")
    current = (fingerprint(*row) for row in zip(prompts, responses, log_probs, strict=True))
    wrong = [
        index for index, (now, then) in enumerate(zip(current, sampled, strict=True)) if now != then
    ]
    if wrong:
        raise _changed(
            f"response {wrong[0]} of the step"
            + (f" and {len(wrong) - 1} more" if wrong[1:] else "")
        )


def refuse_other_tokens(trained: Sequence[int], sampled: Sequence[int], where: str) -> None:
    """Raise UserError unless `trained` is `sampled`, or its beginning, which is what a limit on the length leaves."""
    if list(trained) == list(sampled[: len(trained)]):
        return
    pairs = zip(trained, sampled, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(trained), len(sampled)))
    raise _changed(
        f"{where}, from token {first} on ({len(sampled)} tokens sampled, {len(trained)} to be trained on)"
    )


def _changed(where: str) -> UserError:
    return UserError(
        "the text to train on is not what was sampled", where=where, why=_WHY, fix=_FIX
    )
