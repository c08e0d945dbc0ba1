"""Samples for the report of a verl run: some responses of the first mini-batch of a step, with δ of each token.

The first rank writes the samples, because only the trainer's workers have both δ and the tokens. The driver requests
them by an environment variable, which names the run folder. If this folder does not exist on the worker's machine, no
samples are written. The driver writes the report itself (`qarl.verl.metrics`).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from qarl.errors import UserError
from qarl.report.samples import append_samples, choose_rows, is_logged, make_sample

FOLDER = "QARL_SAMPLES_IN"
_log = logging.getLogger("qarl.verl.plugin")


def log_samples(engine: Any, data: Any) -> None:
    """Append some responses of the mini-batch `data`, verl's TensorDict, to samples.jsonl. Errors are only logged.

    `engine`: gives the rank, the tokenizer, and the number of finished training steps (`lr_scheduler.last_epoch`)."""
    folder = os.environ.get(FOLDER)
    step, total = engine.lr_scheduler.last_epoch + 1, getattr(engine.optimizer_config, "total_training_steps", None)
    if not folder or engine.rank != 0 or not is_logged(step, total) or not Path(folder).is_dir():
        return
    try:
        append_samples(folder, samples_of(data, step, engine.model_config.tokenizer))
    except (UserError, OSError, KeyError, RuntimeError) as error:
        _log.warning("the samples of step %d were not written: %s", step, error)


def samples_of(data: Any, step: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the samples of a mini-batch. Raise KeyError if it lacks old or rollout log-probs."""
    names = ("prompts", "responses", "response_mask", "old_log_probs", "rollout_log_probs", "advantages")
    prompts, responses, masks, old, rollout, advantages = ([row.cpu() for row in data[name].unbind()] for name in names)
    deltas = [
        torch.where(mask != 0, mine.float() - theirs.float(), 0.0).tolist()
        for mask, mine, theirs in zip(masks, old, rollout, strict=True)
    ]
    first = [float(row[0]) if len(row) else 0.0 for row in advantages]
    scores = [float(row.sum()) for row in data["rm_scores"].unbind()] if "rm_scores" in data else None
    return [
        make_sample(
            step,
            tokenizer.decode(prompts[row].tolist()),
            responses[row].tolist(),
            deltas[row],
            tokenizer.decode,
            advantage=first[row],
            reward=scores[row] if scores else None,
        )
        for row in choose_rows(deltas, first)
    ]
