"""Check that the text that is trained on is what the engine sampled.

Log-probs belong to the sampled tokens. If an agent loop strips, completes or replaces text before the update, the
engine's log-probs are for other tokens, and every ratio is wrong. Some agent code does so. In the local backend nobody
stands between the engine and the batch: rewards get texts of their own.
"""

from __future__ import annotations

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


def refuse_other_tokens(trained: Sequence[int], sampled: Sequence[int], where: str) -> None:
    """Raise UserError unless `trained` is `sampled`, or its beginning, which is what a limit on the length leaves."""
    if list(trained) == list(sampled[: len(trained)]):
        return
    first = 0
    for own, other in zip(trained, sampled, strict=False):
        if own != other:
            break
        first += 1
    raise _changed(
        f"{where}, from token {first} on ({len(sampled)} tokens sampled, {len(trained)} to be trained on)"
    )


def _changed(where: str) -> UserError:
    return UserError(
        "the text to train on is not what was sampled", where=where, why=_WHY, fix=_FIX
    )
