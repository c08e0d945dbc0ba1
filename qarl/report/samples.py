"""Writes and reads `samples.jsonl` of a run folder: a few responses of some steps, with δ of each token.

δ is the trainer's log-prob minus the rollout's, in nats. One line is one response:

    {"step": 20, "prompt": "1+2", "tokens": ["=", "3"], "delta": [0.0, -0.012], "left_out": 0, "length": 2,
     "reward": 1.0, "advantage": 0.9, "finish_reason": "stop"}

A long response keeps its first and last `ENDS` tokens, because repetition and garbled text show at the end. `left_out`
counts the tokens between them. `reward` and `finish_reason` are null if the backend does not know them.

The response of a conversation also has `turns`, the number of the model's turns, and `of_model`, which is 1 for each
shown token that the model sampled and 0 for those of the environment, whose δ is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qarl.checkpoint.storage import append_lines, read_lines

Sample = dict[str, Any]
"""A line of `samples.jsonl`."""
SAMPLES_FILE = "samples.jsonl"
ENDS = 256
"""Tokens of a response that are kept at each end."""
PROMPT_CHARACTERS = 2000
EVERY = 10
LATE = 500
EVERY_LATE = 50


def is_logged(step: int, last: int | None = None) -> bool:
    """Return whether samples and report are written after `step`.

    They are written after the first step, after every tenth up to step 500, then after every fiftieth, and after the
    `last`. Late reports are rarer because a report takes 0.1 s per 500 steps that it shows."""
    every = EVERY if step <= LATE else EVERY_LATE
    return step in (1, last) or step % every == 0


def _size(delta: float) -> float:
    return math.inf if math.isnan(delta) else abs(delta)


def choose_rows(deltas: Sequence[Sequence[float]], advantages: Sequence[float]) -> list[int]:
    """Return at most three rows: the one with the largest |δ|, and the first ones with A > 0 and with A < 0.

    NaN counts as the largest |δ|. Rows without tokens are never chosen.
    """
    sizes = [max(map(_size, row), default=-1.0) for row in deltas]
    present = [row for row, size in enumerate(sizes) if size >= 0]
    chosen = [max(present, key=sizes.__getitem__)] if present else []
    for sign in (1, -1):
        chosen += [row for row in present if advantages[row] * sign > 0][:1]
    return list(dict.fromkeys(chosen))


def make_sample(
    step: int,
    prompt: str,
    token_ids: Sequence[int],
    delta: Sequence[float],
    decode: Callable[[list[int]], str],
    *,
    advantage: float,
    reward: float | None = None,
    finish_reason: str | None = None,
    turns: Sequence[tuple[int, int]] | None = None,
) -> Sample:
    """Return the line of one response as a dict. `token_ids` and `delta`: one entry per token of the response.

    `turns`: the spans of the tokens that the model sampled, in a conversation."""
    length = len(token_ids)
    shown = list(range(length))
    if length > 2 * ENDS:
        shown = shown[:ENDS] + shown[-ENDS:]
    sample: Sample = {
        "step": step,
        "prompt": prompt[-PROMPT_CHARACTERS:],
        "tokens": [decode([token_ids[index]]) for index in shown],
        "delta": [_rounded(delta[index]) for index in shown],
        "left_out": length - len(shown),
        "length": length,
        "reward": reward,
        "advantage": _rounded(advantage),
        "finish_reason": finish_reason,
    }
    if turns is not None:
        sampled = {index for start, end in turns for index in range(start, end)}
        sample["turns"] = len(turns)
        sample["of_model"] = [int(index in sampled) for index in shown]
    return sample


def chosen_samples(
    step: int,
    prompts: Sequence[Any],
    responses: Sequence[Any],
    deltas: Sequence[Sequence[float]],
    advantages: Sequence[float],
    decode: Callable[[list[int]], str],
    **more: Sequence[Any],
) -> list[Sample]:
    """Return the samples of the rows that `choose_rows` chooses. `prompts`, `responses`: a tensor of token ids per row.
    `more`: `reward`, `finish_reason` and `turns` of `make_sample`, each for all rows, if known."""
    samples = []
    for row in choose_rows(deltas, advantages):
        prompt = decode(prompts[row].tolist())
        token_ids = responses[row].tolist()
        known = {name: values[row] for name, values in more.items()}
        advantage = advantages[row]
        samples.append(
            make_sample(step, prompt, token_ids, deltas[row], decode, advantage=advantage, **known)
        )
    return samples


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def append_samples(run_dir: str | Path, samples: Sequence[Sample]) -> None:
    """Add lines to `samples.jsonl`. Raise StorageError if writing fails."""
    append_lines(Path(run_dir) / SAMPLES_FILE, samples)


def is_sample(value: Any) -> bool:
    """Return whether the value of a line of samples.jsonl is what it should be: an object with a step."""
    return isinstance(value, dict) and isinstance(value.get("step"), int)


def read_samples(run_dir: str | Path) -> list[Sample]:
    """Return the samples in order of `step`. If a resumed run repeated a step, only its newer samples are returned.

    Damaged lines are skipped. If the file is missing, return an empty list."""
    samples: list[Sample] = []
    for sample in read_lines(Path(run_dir) / SAMPLES_FILE):
        if not is_sample(sample):
            continue
        if samples and sample["step"] < samples[-1]["step"]:
            samples = [earlier for earlier in samples if earlier["step"] < sample["step"]]
        samples.append(sample)
    return samples
