"""`qarl diagnose greedy`: whether greedy answers depend on how many prompts the engine has at a time.

Kernels that sum in another order for another number of rows round otherwise, a token whose probability is close to
another's changes, and the rest of the answer with it. "Give Me FP32 or Give Me Death?" (2025) measures this as Std@Acc,
the standard deviation of the accuracy of greedy decoding over batch sizes, kinds and numbers of GPUs. Here the weights
of `model.path` answer the validation prompts with one engine, by `batch_sizes` prompts at a time, in the precision of
`quant.scheme` and `model.dtype`. At `quant.align=model` and `exact` the engine runs kernels whose rows do not depend on
each other, so every answer must be the same, which was measured on a CPU only.

This departs from that paper, which varies the GPUs, too: a command has one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import fmean, median, stdev
from typing import Any

from qarl.checkpoint.storage import write_json
from qarl.config import Config
from qarl.console import say
from qarl.diagnose.arguments import GreedyRequest
from qarl.errors import UserError
from qarl.metrics.validation import MEAN, Answer, answers_metrics
from qarl.rollout.engine_config import SamplingConfig
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.prepare import prepare_run

FILE = "greedy.json"


@dataclass(frozen=True)
class Answers:
    """The answers of one batch size. `rewards`, `tokens`: of each prompt. `accuracy`: as in an evaluation."""

    batch_size: int
    rewards: Sequence[float]
    tokens: Sequence[Sequence[int]]
    accuracy: float


@dataclass(frozen=True)
class Differences:
    """How the answers of one batch size differ from those of the first. `first`: the median position of the first
    differing token, or None. `rewards`: how many answers have another reward."""

    answers: int
    first: float | None
    rewards: int


def differences(answers: Answers, reference: Answers) -> Differences:
    """Compare answers to the same prompts."""
    positions = [
        common_start(tokens, others)
        for tokens, others in zip(answers.tokens, reference.tokens, strict=True)
        if list(tokens) != list(others)
    ]
    rewards = zip(answers.rewards, reference.rewards, strict=True)
    return Differences(
        answers=len(positions),
        first=median(positions) if positions else None,
        rewards=sum(reward != other for reward, other in rewards),
    )


def common_start(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens two answers have in common before the first that differs."""
    pairs = zip(tokens, others, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def std_at_acc(accuracies: Sequence[float]) -> float:
    """Return the sample standard deviation of accuracies."""
    return stdev(accuracies)


def answer(trainer: LocalTrainer, batch_size: int) -> Answers:
    """Answer the validation prompts, `batch_size` of them at a time, always by the likeliest token."""
    prompts = list(trainer.parts.val_prompts)
    sampling = replace(SamplingConfig.of_evaluation(trainer.config), temperature=0.0)
    parts = [
        trainer.sample(prompts[start : start + batch_size], sampling, phase="eval")
        for start in range(0, len(prompts), batch_size)
    ]
    responses = RolloutBatch.joined(parts)
    rewards = [outcome.score for outcome in trainer.rewards(prompts, responses)]
    figures = answers_metrics(
        Answer(prompt.data_source, prompt.index, reward)
        for prompt, reward in zip(prompts, rewards, strict=True)
    )
    return Answers(batch_size, rewards, responses.response_token_ids, figures[MEAN])


def run(config: Config, request: GreedyRequest) -> dict[str, Any]:
    """Measure, print, and write `greedy.json` to the run directory. Return its content."""
    parts = prepare_run(config)
    if not parts.val_prompts:
        raise UserError(
            "there is no prompt to answer",
            where="data.val_files",
            why="qarl diagnose greedy answers the validation prompts",
            fix="name a file in data.val_files",
        )
    trainer = LocalTrainer(config, parts)
    measured = []
    with trainer.engine:
        trainer.publish()
        for batch_size in request.batch_sizes:
            with trainer.timer.phase("eval"):
                measured.append(answer(trainer, batch_size))
            say(f"{batch_size} at a time: accuracy {measured[-1].accuracy:.2%}")
    report = report_of(config, measured)
    print(as_text(report))
    write_json(config.run_dir / FILE, report)
    return report


def report_of(config: Config, measured: Sequence[Answers]) -> dict[str, Any]:
    """Return what is written."""
    rows = []
    for answers in measured:
        difference = differences(answers, measured[0])
        rows.append(
            {
                "batch_size": answers.batch_size,
                "accuracy": answers.accuracy,
                "other_answers": difference.answers,
                "first_other_token": difference.first,
                "other_rewards": difference.rewards,
            }
        )
    return {
        "scheme": config.quant.scheme,
        "level": config.quant.align,
        "dtype": config.model.dtype,
        "prompts": len(measured[0].rewards),
        "tokens": fmean(len(tokens) for tokens in measured[0].tokens),
        "std_at_acc": std_at_acc([answers.accuracy for answers in measured]),
        "batch_sizes": rows,
    }


def as_text(report: dict[str, Any]) -> str:
    """Return the report as a Markdown table and a line."""
    prompts = report["prompts"]
    lines = [
        "| prompts at a time | accuracy | other answers | other rewards | first other token (median) |",
        "|---|---|---|---|---|",
    ]
    for row in report["batch_sizes"]:
        first = row["first_other_token"]
        cells = [
            str(row["batch_size"]),
            f"{row['accuracy']:.2%}",
            f"{row['other_answers']} of {prompts}",
            str(row["other_rewards"]),
            "" if first is None else f"{first:g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    what = f"{report['scheme']}, {report['dtype']}, quant.align={report['level']}"
    length = f"{report['tokens']:.0f} tokens on average"
    last = f"{what}: Std@Acc {report['std_at_acc']:.3%} ({prompts} greedy answers of {length})"
    return "\n".join(["", *lines, "", last])
