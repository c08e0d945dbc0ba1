"""The rows of docs/do/paper_runs.md that repeat VeXact's table 2 (arXiv 2605.14220, appendix A.1), value by value."""

from __future__ import annotations

import re
import shlex
import sys
from typing import Any

import pytest
from checkout import ROOT

from qarl.align.cuda import unavailable_on_cuda
from qarl.checks.model_folder import hf_config_or_carried

sys.path.insert(0, str(ROOT / "scripts"))
import prepare_math_eval
import prepare_openr1_math
from recipe_plans import Recipe, rows_of

PAGE = (ROOT / "docs/do/paper_runs.md").read_text(encoding="utf-8")
ROWS = [Recipe.of(line) for line in rows_of(PAGE) if "qwen3_1_7b_bf16.yaml" in line]
SANITY = ["data/sanity_r1d/train.parquet"]
TABLE: dict[str, dict[str, Any]] = {
    "dense GRPO": {
        "model.path": "Qwen/Qwen3-1.7B",
        "actor.loss": "grpo",
        "algorithm.adv_estimator": "grpo",
        "data.train_files": SANITY,
        "trainer.test_freq": 50,
        "data.train_batch_size": 64,
        "actor.ppo_mini_batch_size": 16,
        "rollout.n": 8,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 8192,
        "trainer.nnodes": 1,
    },
    "dense REINFORCE": {
        "model.path": "Qwen/Qwen3-1.7B",
        "actor.loss": "reinforce",
        "data.train_files": SANITY,
        "trainer.test_freq": 50,
        "data.train_batch_size": 64,
        "actor.ppo_mini_batch_size": 64,  # section 3.2: one update for each batch of rollouts
        "data.max_prompt_length": 1024,
        "data.max_response_length": 8192,
        "trainer.nnodes": 2,
    },
    "MoE REINFORCE": {
        "model.path": "Qwen/Qwen3-30B-A3B",
        "actor.loss": "reinforce",
        "data.train_files": ["data/dapo_math/train.parquet"],
        "trainer.test_freq": 20,
        "data.train_batch_size": 512,
        "actor.ppo_mini_batch_size": 512,
        "data.max_prompt_length": 2048,
        "data.max_response_length": 20480,
        "trainer.nnodes": 8,
    },
}
"""Column of the paper's table -> our keys with its values. The rows of a column differ in δ alone."""
ARMS = {
    "dense GRPO": {("model", False), ("off", False), ("off", True)},
    "dense REINFORCE": {("model", False), ("off", False)},
    "MoE REINFORCE": {("off", False)},
}
"""quant.align, and whether the old log-probs are the rollout's."""


def column_of(recipe: Recipe) -> str:
    config = recipe.config
    kind = "MoE" if "A3B" in config.model.path else "dense"
    return f"{kind} {config.actor.loss.upper()}"


def value_of(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("column", TABLE)
def test_rows_have_the_papers_values_and_differ_in_alignment(column: str) -> None:
    rows = [recipe.config for recipe in ROWS if column_of(recipe) == column]
    arms = {(str(row.quant.align), row.rollout_correction.bypass_mode) for row in rows}
    assert arms == ARMS[column] and len(rows) == len(arms)
    settings = []
    for row in rows:
        for key, value in TABLE[column].items():
            assert value_of(row, key) == value, key
        assert row.quant.scheme == "bf16" and row.trainer.n_gpus_per_node == 8
        assert row.data.val_files == ["data/math_eval/aime24.parquet"]
        settings.append(row.model_dump())
        del settings[-1]["name"], settings[-1]["quant"]["align"]
        del settings[-1]["rollout_correction"]["bypass_mode"]
    assert all(setting == settings[0] for setting in settings)


def test_all_rows_belong_to_the_table() -> None:
    assert {column_of(recipe) for recipe in ROWS} == set(TABLE)


def test_the_pages_commands_write_the_files_of_the_rows() -> None:
    section = PAGE.partition("\n## VeXact's recipes\n")[2].partition("\n## ")[0]
    commands = section.replace("\\\n", " ")
    training = re.findall(r"^python scripts/prepare_openr1_math.py (.*)$", commands, re.M)
    written = [prepare_openr1_math.parse_arguments(shlex.split(words)) for words in training]
    assert {str(arguments.output) for arguments in written} == {
        file for recipe in ROWS for file in recipe.config.data.train_files
    }
    (words,) = re.findall(r"^python scripts/prepare_math_eval.py (.*)$", commands, re.M)
    evaluation = prepare_math_eval.parse_arguments(shlex.split(words))
    names = {str(evaluation.output / f"{name}.parquet") for name in evaluation.sets}
    assert names == {file for recipe in ROWS for file in recipe.config.data.val_files}
    assert all(arguments.eval_sets == evaluation.sets for arguments in written)


@pytest.mark.parametrize(
    ("path", "why"),
    [("Qwen/Qwen3-1.7B", None), ("Qwen/Qwen3-30B-A3B", "not for experts in BF16")],
)
def test_the_level_exists_on_gpus_where_the_page_says(path: str, why: str | None) -> None:
    config, _ = hf_config_or_carried(path)
    missing = unavailable_on_cuda(config, (9, 0), kernels=())
    assert missing is None if why is None else why in str(missing)
