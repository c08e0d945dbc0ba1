"""The demos: shipped configs whose model and data `qarl demo` makes."""

from __future__ import annotations

from typing import NamedTuple


class Demo(NamedTuple):
    """A shipped config that runs on a CPU. `task`, `experts`: which model and data (`qarl.demo.tiny_model`).

    `arms`: the overrides of each run; one run without any by default."""

    config: str
    task: str = "column_addition"
    experts: int = 0
    arms: tuple[tuple[str, ...], ...] = ((),)


MISMATCH = (
    "actor.loss=grpo",
    "actor.old_log_probs=rollout",
    "seed=77",
    "trainer.total_training_steps=45",
    "trainer.test_freq=15",
    "trainer.val_max_prompts=128",
)
"""Overrides of addition_chain in which the ratio of the loss contains the mismatch, which ruins the run in minutes."""

DEFAULT = "quickstart"
DEMOS = {
    DEFAULT: Demo("quickstart.yaml"),
    "moe": Demo("quickstart_moe.yaml", experts=8),
    "verl": Demo("quickstart_verl.yaml"),
    "addition_chain": Demo("addition_chain.yaml", "addition_chain"),
    "letter_sorting": Demo("letter_sorting.yaml", "letter_sorting"),
    "mismatch": Demo(
        "addition_chain.yaml",
        "addition_chain",
        arms=(
            (*MISMATCH, "name=mismatch_off", "quant.align=off"),
            (*MISMATCH, "name=mismatch_aligned", "quant.align=model"),
        ),
    ),
}
"""Name of a demo -> what it runs."""


DEMO_HINT = "`qarl demo --help` says how to make the models and data of the shipped configs"
