"""The trainer's log-probs of TRL's batches, computed as QaRL's policy computes them.

TRL pads prompts on the left and responses on the right, passes no positions, and multiplies by lm_head in its own
fused function. Each of these changes the bits of the log-probs. So QaRL removes the padding and packs the rows
(`qarl.trainer.batch`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qarl.kernels.log_probs import LogitsInBlocks, log_probs_and_entropies
from qarl.trainer.batch import Batch
from qarl.trainer.policy import Policy
from qarl.turns.conversation import Span, later_prefills


def as_batch(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_width: int,
    turns: Sequence[Sequence[Span]] | None = None,
) -> Batch:
    """Return TRL's rows as QaRL's batch. A row is a prompt padded on the left, then a response padded on the right.

    Args:
        input_ids, attention_mask: [B, T].
        response_width: number of columns that belong to responses. They are the last columns.
        turns: of each row, if the engine held it in a session.
    """
    prompt_lengths = attention_mask[:, :-response_width].sum(1)
    padding = input_ids.shape[1] - response_width - prompt_lengths
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)[None, :] + padding[:, None]
    shifted = input_ids.gather(1, columns.clamp(max=input_ids.shape[1] - 1))
    empty = torch.zeros(len(input_ids), device=input_ids.device)
    mask = attention_mask[:, -response_width:].bool()
    later = None
    if turns is not None:
        lengths = zip(prompt_lengths.tolist(), mask.any(1).tolist(), strict=True)
        later = [
            later_prefills(prompt, spans) if trained else ()
            for (prompt, trained), spans in zip(lengths, turns, strict=True)
        ]
    return Batch(
        input_ids=shifted,
        prompt_lengths=prompt_lengths,
        response_lengths=mask.sum(1),
        responses=input_ids[:, -response_width:],
        response_mask=mask,
        rollout_log_probs=torch.zeros(mask.shape, device=mask.device),
        rewards=empty,
        advantages=empty,
        weight_version=0,
        later_prefills=later,
    )


def sampled_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the mask of the tokens that the model sampled, int64 [B, T], in TRL's batch. TRL calls that of
    conversations `tool_mask`."""
    mask: torch.Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def log_probs_of_rows(
    policy: Policy,
    batch: Batch,
    rows: slice,
    *,
    temperature: float,
    entropies: bool,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probs and, if `entropies` is true, entropies in nats. Both are FP32 [rows, response_width], 0 on
    padding."""
    layout = policy.lay_out(batch, rows)
    tokens = layout.of_responses(batch.responses[rows])
    with policy.routing(batch, rows, layout):
        logits = policy.logits(batch, rows, layout)
    log_probs, _ = logits.log_probs(tokens, temperature=temperature, likeliest=False)
    if not entropies:
        entropy = None
    elif isinstance(logits, LogitsInBlocks):
        entropy = log_probs_and_entropies(
            logits.hidden, logits.weight, tokens, temperature=temperature
        )[1]
    else:
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = entropies_of_logits(logits.logits, temperature=temperature)
    return layout.to_responses(log_probs), None if entropy is None else layout.to_responses(entropy)


def entropies_of_logits(logits: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Return the entropy in nats of each row's softmax, FP32 [T], from logits [T, V]."""
    every = (logits.float() / temperature).log_softmax(-1)
    return -(every.exp() * every).sum(-1)
