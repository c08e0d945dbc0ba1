"""Log-probs of a batch of verl's by the operation that the rollout engine and the local backend use.

verl subtracts logsumexp from the chosen logit (verl/utils/torch_functional.py), which differs from log_softmax in the
last bit: up to 1.2e-6 if everything else is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from verl.utils import tensordict_utils as tu


def chosen_log_probs(logits: torch.Tensor, output_args: Any, micro_batch: Any, gather: Callable[..., Any]) -> Any:
    """log_softmax(logits / temperature) at each place's next token: jagged like `input_ids`, FP32.

    `logits`: FP32, [1, tokens, V] of packed rows, [B, T, V] of padded ones. `output_args`: of verl's
    `prepare_model_inputs`. `gather`: verl's, which joins the parts of a packed sequence and takes its padding off.
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
