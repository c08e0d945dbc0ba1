"""Checks prompts and reward function, loaded as in the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qarl.data import Prompt, check_disjoint, run_prompts
from qarl.data.rewards import check_reward_fn
from qarl.doctor.context import Context, NotCheckedError
from qarl.doctor.findings import Topic


def check_train(context: Context, topic: Topic) -> None:
    """Whether the training prompts exist and are complete, and which are too long."""
    _missing_elsewhere(context, context.config.data.train_files)
    prompts = context.train_prompts.load()
    if prompts.num_filtered:
        topic.note(
            f"{prompts.num_filtered} training prompts are longer than data.max_prompt_length and are left out",
            fix="raise data.max_prompt_length to train on them",
        )
    sampler = run_prompts.prompt_sampler(context.config, prompts)
    steps = context.config.trainer.total_training_steps
    topic.ok(
        f"{len(prompts)} training prompts of at most {_longest(prompts)} tokens (limit: "
        f"{context.config.data.max_prompt_length}); {steps} steps are {steps / sampler.batches_per_epoch:.3g} epochs"
    )


def check_val(context: Context, topic: Topic) -> None:
    """Whether evaluation prompts exist and are not among the training prompts."""
    _missing_elsewhere(context, context.config.data.val_files)
    prompts = context.val_prompts.load()
    if not prompts:
        topic.note("nothing is evaluated", fix="set data.val_files and trainer.test_freq")
        return
    topic.ok(f"{len(prompts)} evaluation prompts of at most {_longest(prompts)} tokens")
    if shared := check_disjoint(context.train_prompts.get(), prompts):
        topic.warning(
            f"{shared} of the evaluation prompts are also in the training data",
            where="data.val_files",
            why="accuracy on them says nothing about new prompts",
            fix="remove them from data.val_files or from data.train_files",
        )


def check_reward(context: Context, topic: Topic) -> None:
    """Whether the reward function can be called on a row."""
    function = context.reward_fn.load()
    _missing_elsewhere(context, context.config.data.train_files)
    check_reward_fn(function, context.train_prompts.get(), timeout_s=context.config.reward.timeout_s)
    topic.ok(f"reward.function={context.config.reward.function} scores a row")


def _missing_elsewhere(context: Context, files: Sequence[str]) -> None:
    """Raise NotCheckedError if files are missing on this machine and the run is for a different one."""
    missing = [file for file in files if not Path(file).is_file()]
    if missing and not context.target.here:
        raise NotCheckedError(f"not on this machine: {', '.join(missing)}", "run the doctor on a machine that has them")


def _longest(prompts: Sequence[Prompt]) -> int:
    return max(len(prompt.prompt_token_ids) for prompt in prompts)


CHECKS = (check_train, check_val, check_reward)
