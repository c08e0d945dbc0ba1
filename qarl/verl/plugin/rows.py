"""The rows of a verl forward, for QaRL's attention functions.

With `use_remove_padding`, verl packs the rows of a micro-batch into one forward [1, tokens] and passes `position_ids`.
Attention finds the rows in these (`qarl.align.packed_attention`).

Without it, verl pads the rows on the right and passes a mask. QaRL replaces the mask with the lengths of the rows. The
mask is not needed, because no token attends to the padding after it. With a mask, attention would compute
differently, and the log-probs would change.
"""

from __future__ import annotations

from typing import Any

import torch


def row_inputs(inputs: dict[str, Any], micro_batch: Any, *, exact: bool) -> dict[str, Any]:
    """Return the changes to `inputs`, the model's keyword arguments from verl's `prepare_model_inputs`.

    Args:
        exact: whether the engine's attention operator is used, which needs the lengths of the prompts.
    """
    lengths = micro_batch["input_ids"].offsets().diff()
    padded = inputs.get("attention_mask") is not None
    found: dict[str, Any] = {}
    rows = lengths.tolist()
    if padded:
        found |= {"attention_mask": None, "position_ids": None}
    else:
        filler = inputs["input_ids"].shape[1] - sum(rows)  # verl's pad_to_length adds a row
        rows += [filler] * (filler > 0)
    found["row_lengths"] = tuple(rows)
    if exact:
        prompts = micro_batch["prompts"].offsets().diff()
        found["prompt_lengths"] = torch.cat([prompts, lengths.new_tensor(rows[len(lengths) :])])
    return found
