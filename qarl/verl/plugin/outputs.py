"""Computes the log-probs of a verl batch with log_softmax, as the rollout engine and the local backend do.

verl itself subtracts logsumexp from the chosen logit (verl/utils/torch_functional.py). Its result differs from
log_softmax in the last bits, by up to 1.2e-6 if everything else is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from verl.utils import tensordict_utils as tu


def chosen_log_probs(logits: torch.Tensor, output_args: Any, micro_batch: Any, gather: Callable[..., Any]) -> Any:
    """Return log_softmax(logits / temperature) of the next token at each position, in FP32 and jagged like `input_ids`.

    `logits`: FP32, [1, tokens, V] for packed rows, [B, T, V] for padded rows. `output_args`: from verl's
    `prepare_model_inputs`. `gather`: verl's function that joins the parts of a packed sequence and removes padding.
    """
    offsets, labels = micro_batch["input_ids"].offsets(), output_args["input_ids_rmpad_rolled"]
    packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
    if packed:
        rows, temperature = logits.squeeze(0), output_args["temperature_rmpad"]
    else:
        lengths = offsets.diff()
        places = torch.arange(logits.shape[1], device=logits.device)[None, :] < lengths[:, None]
        rows, temperature = logits[places], output_args["temperature"].repeat_interleave(lengths)
    if not output_args.get("temperature_is_one", False):
        rows = rows / temperature.clamp(min=1e-8)[:, None]
    chosen = rows.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    if packed:
        chosen = gather(chosen, output_args["pad_size"])
    return torch.nested.nested_tensor_from_jagged(chosen, offsets)
