"""Makes all checks, topic by topic. If one check fails, the others are still made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qarl.checks.run import RunInputs, checks_for
from qarl.config import Config
from qarl.data import PromptDataset
from qarl.data.rewards import RewardFn
from qarl.doctor import (
    backend,
    data,
    disk,
    ignore,
    kernels,
    loss,
    machine,
    memory,
    model,
    packages,
    shapes,
    values,
    wire,
)
from qarl.doctor.context import Context, NotCheckedError
from qarl.doctor.findings import Finding, Report, Topic
from qarl.doctor.target import Target
from qarl.errors import UserError

Check = Callable[[Context, Topic], None]

TOPICS: dict[str, tuple[Check, ...]] = {
    "values": values.CHECKS,
    "backend": backend.CHECKS,
    "machine": machine.CHECKS,
    "packages": packages.CHECKS,
    "model": model.CHECKS,
    "ignore list": ignore.CHECKS,
    "layer sizes": shapes.CHECKS,
    "kernels": kernels.CHECKS,
    "published tensors": wire.CHECKS,
    "memory": memory.CHECKS,
    "disk": disk.CHECKS,
    "data": data.CHECKS,
    "loss": loss.CHECKS,
}
ONLY_HERE = ("packages", "disk")
"""Topics about the current state of this machine. They are left out if the run is checked for a different machine."""


def run_checks(config: Config, target: Target, *, threads_given: str | None = None) -> Report:
    """Make every check for `config` on `target`, without starting an engine, loading weights or writing files.

    `threads_given`: OMP_NUM_THREADS before this process set it.
    """
    context = Context(config, target, threads_given)
    findings = []
    for name, checks in TOPICS.items():
        if name in ONLY_HERE and not target.here:
            continue
        topic = Topic(name)
        for check in checks:
            make(check, context, topic)
        findings += topic.findings
    findings += others(context, findings)
    return Report(config.name, target.name, tuple(findings))


class _Inputs(RunInputs):
    """The inputs of training's own checks, from what the doctor has already loaded."""

    def __init__(self, context: Context) -> None:
        super().__init__(context.config)
        self._context = context

    @property
    def tokenizer(self) -> Any:
        return self._context.tokenizer.get()

    @property
    def hf_config(self) -> Any:
        return self._context.hf_config.get()

    @property
    def train_prompts(self) -> PromptDataset:
        return self._context.train_prompts.get()

    @property
    def reward_fn(self) -> RewardFn:
        return self._context.reward_fn.get()

    @property
    def val_prompts(self) -> PromptDataset | list[Any]:
        return self._context.val_prompts.get()


def others(context: Context, findings: Sequence[Finding]) -> list[Finding]:
    """Make training's own checks. Return the errors that no topic has reported."""
    if not context.target.here or context.no_model is not None:
        return []
    topic, known, inputs = Topic("start"), {finding.what for finding in findings}, _Inputs(context)
    for check in checks_for(context.config.backend):
        try:
            check.make(inputs)
        except NotCheckedError:
            continue  # the topic that could not load this part has reported it
        except UserError as error:
            if error.what not in known:
                topic.refusal(error)
    return topic.findings


def make(check: Check, context: Context, topic: Topic) -> None:
    """Make one check. If it raises an exception, add the exception as a finding."""
    what = (check.__doc__ or check.__name__).partition("\n")[0].rstrip(".")
    what = what[0].lower() + what[1:]
    try:
        check(context, topic)
    except NotCheckedError as error:
        topic.note(f"not checked: {what}", why=str(error), fix=error.fix)
    except UserError as error:
        topic.refusal(error)
    except Exception as error:  # a check that breaks must not hide the others
        topic.warning(
            f"the check broke: {what}",
            why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            fix="all other checks are complete; please report this one",
        )
