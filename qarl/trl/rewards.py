"""A reward function by its name in TRL: `reward_funcs="path/to/file.py:function"`, or one of the built-in names.

So the function of another backend's `reward.function` has the same signature and the same score here. It runs in worker
processes (`qarl.data.reward_workers`). A callable that is given to `GRPOTrainer` stays in the trainer's process, as in
TRL, without a limit of time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from qarl.data.response_text import response_texts
from qarl.data.rewards import BUILTIN, TURN_SCORES
from qarl.data.scoring import find_reward, score_rows
from qarl.errors import UserError

_OTHER_NAMES = ("answer", "solution", "answers", "label", "target", "reference")
"""Columns of known datasets, as GSM8K and MATH, that have what is a ground truth here."""
TURN_COLUMNS = ("num_turns", "messages", TURN_SCORES)
"""What reward functions get of a conversation with an environment, by name, as in `extra_info` of other backends."""


def is_name(reward_func: Any) -> bool:
    """Return whether `reward_func` names a function. Names of reward models on the Hub have no colon."""
    return isinstance(reward_func, str) and (":" in reward_func or reward_func in BUILTIN)


def named_reward(
    spec: str, *, workers: int, timeout_s: float | None, tokenizer: Any = None
) -> Callable[..., list[float]]:
    """Return the function `spec` with TRL's signature. It is loaded now, in its first worker process.

    Of the dataset's columns it gets `data_source` (default: empty), `ground_truth` (or verl's `reward_model`, which has
    it), and `extra_info` (default: empty). Of a conversation of several turns it gets the text of all turns and
    answers, which `tokenizer` decodes, and what `qarl.rollout.turns.scored_prompts` adds to `extra_info`.

    Raises:
        UserError: the function cannot be loaded. A call raises the errors of `qarl.data.scoring.score_responses`, or
            that the dataset has no ground truths.
    """
    reward = find_reward(spec, workers)
    reward.load()

    def call(
        prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any = (), **columns: Any
    ) -> list[float]:
        texts = [*map(text_of, completions)]
        if tokenizer is not None and any(is_of_turns(completion) for completion in completions):
            texts = response_texts(tokenizer, completion_ids, keep_special_tokens=False)
        rows = [
            {
                "data_source": source,
                "solution_str": text,
                "ground_truth": truth,
                "extra_info": {**(extra or {}), **of_conversation(columns, row)},
            }
            for row, (text, source, truth, extra) in enumerate(
                zip(
                    texts,
                    columns.get("data_source") or [""] * len(prompts),
                    ground_truths(columns),
                    columns.get("extra_info") or [{}] * len(prompts),
                    strict=True,
                )
            )
        ]
        locations = [f"response {index} of a rollout, " for index in range(len(rows))]
        return score_rows(reward, rows, locations, timeout_s=timeout_s)

    call.__name__ = spec.rpartition(":")[2]
    return call


def ground_truths(columns: Mapping[str, Any]) -> Sequence[Any]:
    """Return the ground truth of each row. Raise UserError if the dataset has none."""
    if "ground_truth" in columns:
        truths: Sequence[Any] = columns["ground_truth"]
        return truths
    rows = columns.get("reward_model") or ()
    if rows and all(isinstance(row, Mapping) and "ground_truth" in row for row in rows):
        return [row["ground_truth"] for row in rows]
    raise no_ground_truths(columns)


def check_ground_truths(columns: Collection[str]) -> None:
    """Raise UserError if a dataset with `columns` has no ground truths. If no columns are known, do nothing."""
    if columns and not {"ground_truth", "reward_model"} & {*columns}:
        raise no_ground_truths(columns)


def no_ground_truths(columns: Collection[str]) -> UserError:
    """Return the error for a dataset with `columns`, which may have them under another name."""
    fix = "add the column ground_truth"
    if others := [name for name in _OTHER_NAMES if name in columns]:
        fix = f'write dataset.rename_column("{others[0]}", "ground_truth")'
    return UserError(
        "the dataset has no ground truths",
        where="train_dataset, eval_dataset",
        why="a reward function by name compares with a column ground_truth, or with ground_truth in verl's column "
        "reward_model",
        fix=f"{fix}, or give reward_funcs a function with TRL's signature",
    )


def of_conversation(columns: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return what an environment's conversation adds to the `extra_info` of a row."""
    if TURN_SCORES not in columns:
        return {}
    return {name: columns[name][row] for name in TURN_COLUMNS}


def is_of_turns(completion: Any) -> bool:
    """Return whether a completion, text or a list of messages, has several messages."""
    return not isinstance(completion, str) and len(completion) > 1


def text_of(completion: Any) -> str:
    """Return the text of a completion: text, or a list of messages, of which the last one counts."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
