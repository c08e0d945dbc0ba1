"""Write the report of a local run during the run: samples of a step's batch, and the page.

If the report cannot be written, the run continues. `qarl report` can write it later from metrics.jsonl.
"""

from __future__ import annotations

from typing import Any

from qarl.config import Config
from qarl.console import say
from qarl.errors import UserError
from qarl.report.page import write_report
from qarl.report.samples import append_samples, choose_rows, is_logged, make_sample
from qarl.trainer.batch import Batch
from qarl.trainer.old_log_probs import Measured


def log_samples(config: Config, step: int, batch: Batch, measured: Measured, tokenizer: Any) -> None:
    """Append some responses of `step` to samples.jsonl, if `is_logged` chooses this step.

    `measured`: the trainer's log-probs before the update. Responses that have none are not chosen."""
    if not config.trainer.report or not is_logged(step, config.trainer.total_training_steps):
        return
    lengths = batch.response_mask.sum(1).tolist()
    differences = (measured.log_probs - batch.rollout_log_probs).cpu()
    deltas = [
        row[:length].tolist() if known else []
        for row, length, known in zip(differences, lengths, measured.known.tolist(), strict=True)
    ]
    advantages = batch.advantages.tolist()
    samples = []
    for row in choose_rows(deltas, advantages):
        prompt = batch.input_ids[row, : int(batch.prompt_lengths[row])].tolist()
        samples.append(
            make_sample(
                step,
                tokenizer.decode(prompt),
                batch.responses[row, : lengths[row]].tolist(),
                deltas[row],
                tokenizer.decode,
                advantage=advantages[row],
                reward=float(batch.rewards[row]),
                finish_reason=None if batch.finish_reasons is None else batch.finish_reasons[row],
            )
        )
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        append_samples(config.run_dir, samples)
    except (UserError, OSError) as error:
        say(f"warning: the samples of step {step} were not written: {error}")


def update_report(config: Config, step: int) -> None:
    """Write report.html after `step`, if `is_logged` chooses this step."""
    if not config.trainer.report or not is_logged(step):
        return
    try:
        write_report(config.run_dir)
    except (UserError, OSError) as error:
        say(f"warning: the report was not written after step {step}: {error}")
