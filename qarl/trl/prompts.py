"""The length of the longest prompt in a TRL dataset, which sets the engine's largest length."""

from __future__ import annotations

from typing import Any

from qarl.errors import UserError
from qarl.trl.config import QaRLConfig


def longest_prompt(args: QaRLConfig, tokenizer: Any, *datasets: Any) -> int:
    """Return the largest number of tokens that a prompt may have.

    If `vllm_max_model_length` is set, this is the number that it leaves for a prompt. Otherwise it is the length of the
    longest prompt in the datasets.

    Raises:
        UserError: a prompt is longer than `vllm_max_model_length` allows, there is no prompt, or a dataset is a stream
            and `vllm_max_model_length` is not set.
    """
    lengths = [length for data in datasets if data is not None for length in _lengths(args, tokenizer, data)]
    longest = max(lengths, default=0)
    limit, response = args.vllm_max_model_length, args.max_completion_length
    assert response is not None  # `check_args` refuses None
    if limit is None:
        if not longest:
            raise UserError("the training data has no prompts", where="train_dataset", fix="add rows with a 'prompt'")
        return longest
    room = limit - response
    if room < max(longest, 1):
        raise UserError(
            f"vllm_max_model_length={limit} leaves {room} tokens for a prompt, but the longest has {longest}",
            where="vllm_max_model_length",
            fix=f"set it to {max(longest, 1) + response} or more, or remove it",
        )
    return room


def _lengths(args: QaRLConfig, tokenizer: Any, data: Any) -> list[int]:
    if isinstance(data, dict):
        return [length for one in data.values() for length in _lengths(args, tokenizer, one)]
    if not hasattr(data, "__len__"):
        if args.vllm_max_model_length is None:
            raise UserError(
                "the prompts of a streamed dataset have unknown lengths",
                where="vllm_max_model_length",
                why="the engine needs a limit on the length of prompt plus response",
                fix="set vllm_max_model_length to the tokens of the longest prompt plus max_completion_length",
            )
        return []
    if "prompt" not in data.column_names:
        raise UserError(
            "the dataset has no column 'prompt'",
            where="train_dataset",
            why=f"its columns are {', '.join(data.column_names)}",
            fix="rename the column with the prompts to 'prompt'",
        )
    return [len(tokens) for tokens in tokenize(tokenizer, data["prompt"], args.chat_template_kwargs or {})]


def tokenize(tokenizer: Any, prompts: Any, template: Any) -> list[list[int]]:
    """Return the token ids of texts or conversations."""
    prompts = list(prompts)
    if not prompts:
        return []
    if isinstance(prompts[0], str):
        return list(tokenizer(prompts)["input_ids"])
    found = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **template
    )
    return list(found["input_ids"])
