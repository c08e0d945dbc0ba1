"""The rows of a verl forward, for QaRL's attention functions.

With `use_remove_padding` verl packs the rows of a micro-batch into one forward [1, tokens] and passes `position_ids`,
from which attention reads the rows (`qarl.align.rows`). Otherwise verl pads the rows on the right and passes a mask.
QaRL drops this mask, because no token of a row sees the padding behind it, and passes the lengths of the rows instead.
A mask would make attention compute in another way, and so change a row's log-probs.

With `use_dynamic_bsz` verl limits a micro-batch by tokens. It gives all ranks the same number of micro-batches, because
FSDP's collectives need it (`rearrange_micro_batches` in verl/utils/seqlen_balancing.py, verl 0.9.1).
"""

from __future__ import annotations

from typing import Any

import torch


def row_inputs(inputs: dict[str, Any], micro_batch: Any, *, exact: bool) -> dict[str, Any]:
    """Return what to change in `inputs`, the model's keyword arguments from verl's `prepare_model_inputs`.

    Args:
        exact: whether attention is the engine's, which needs the lengths of the prompts.
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
