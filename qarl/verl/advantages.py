"""Which of verl's rows have equal rewards. Equal rewards teach nothing, so their advantages are exactly 0.

verl's estimators divide the rounding error of a mean by a small number, so without this a group of equal rewards moves
the weights. verl calls its GRPO directly and not through its registry of estimators, and only there it uses the last
output of each session. So the rows are found by the same rule after verl has computed the advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qarl.trainer.advantages import baseline_of, equal_rewards


def rows_of_equal_rewards(
    keys: Sequence[str], rewards: torch.Tensor, filled: torch.Tensor, algorithm: Any
) -> list[int]:
    """Return the rows whose rewards all equal those that verl's estimator compares them with.

    Args:
        keys: verl's key of each row, PROMPT_SESSION_OUTPUT.
        rewards: FP32 [rows]. `filled`: bool [rows], whether a row has a token that is trained on.
        algorithm: verl's section of that name.
    """
    baseline = baseline_of(algorithm.adv_estimator)
    if baseline == "batch" and algorithm.gamma != 1.0:
        return []  # discounted rewards differ from token to token
    sessions = [key.rpartition("_")[0] for key in keys]
    compared = _last_outputs(keys) if algorithm.adv_estimator == "grpo" else list(range(len(keys)))
    prompts = [sessions[row].rpartition("_")[0] for row in compared]
    equal = equal_rewards(rewards[compared], prompts, baseline=baseline, filled=filled[compared])
    of_rows = zip(compared, equal.tolist(), strict=True)
    chosen = {sessions[row] for row, is_equal in of_rows if is_equal}
    return [row for row, session in enumerate(sessions) if session in chosen]


def _last_outputs(keys: Sequence[str]) -> list[int]:
    """Return the row of each session's last output."""
    last: dict[str, tuple[int, int]] = {}
    for row, key in enumerate(keys):
        session, _, output = key.rpartition("_")
        latest = last.get(session, (-1, -1))
        last[session] = max(latest, (int(output), row))
    return sorted(row for _, row in last.values())
