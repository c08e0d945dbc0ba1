"""Scores and lengths of verl's responses, and how many of them were cut off at the limit.

verl drops the engine's finish reason, and counts the responses that are as long as the longest of the batch. So a batch
in which nothing is cut off has a `clip_ratio` above 0. Here a response counts as cut off, as vLLM does, if it has the
limit's number of tokens and its last token is no end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from qarl.checks.generation import model_eos
from qarl.checks.model_folder import hf_config_or_carried
from qarl.errors import UserError
from qarl.metrics.step_metrics import response_metrics


def end_tokens(path: str, tokenizer: Any, *, trust_remote_code: bool) -> set[int]:
    """Return the tokens at which vLLM ends a response: the tokenizer's EOS, and those of the model's files.

    Files that this process cannot read are left out."""
    ends = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    try:
        hf_config, _ = hf_config_or_carried(path, trust_remote_code)
        return ends.union(model_eos(path, hf_config)[1])
    except UserError:
        return ends


def finish_reasons(
    responses: Sequence[torch.Tensor], limit: int, ends: Collection[int]
) -> list[str]:
    """Return "length" for each response that was cut off at `limit` tokens, else "stop". Each is int64 [tokens]."""
    return [
        "length" if len(row) >= limit and int(row[-1]) not in ends else "stop" for row in responses
    ]


def corrected_metrics(
    scores: Sequence[float],
    responses: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    prompts: Sequence[int],
    config: Any,
    ends: set[int],
    told: Sequence[str | None] | None = None,
) -> dict[str, float]:
    """Return the metrics of scores and lengths as the local backend has them, and verl's other two `clip_ratio`s.

    Args:
        scores, responses, masks: of each response; its tokens and its mask as int64 [tokens]. Lengths count the
            tokens in the mask.
        prompts: number of tokens of each prompt. `prompt_length/clip_ratio` is the share at their limit.
        config: verl's section `data`, which has both limits.
        told: the finish reason of each response, if its agent loop has said it.
    """
    reasons = finish_reasons(responses, config.max_response_length, ends)
    if told is not None:
        reasons = [known or reason for known, reason in zip(told, reasons, strict=True)]
    lengths = [int(mask.sum()) for mask in masks]
    metrics = response_metrics(scores, lengths, reasons)
    filled = [row for row, length in enumerate(lengths) if length]
    if filled:
        of_filled = response_metrics(
            [scores[row] for row in filled],
            [lengths[row] for row in filled],
            [reasons[row] for row in filled],
        )
        metrics |= {
            name.replace("response_length/", "response_length_non_aborted/"): value
            for name, value in of_filled.items()
            if name.startswith("response_length/")
        }
    else:
        metrics["response_length_non_aborted/clip_ratio"] = float("nan")
    at_limit = [length >= config.max_prompt_length for length in prompts]
    metrics["prompt_length/clip_ratio"] = sum(at_limit) / len(at_limit)
    return metrics
