"""Each row of the table of recipes and baselines in docs/do/paper_runs.md: its dry run, and what it says of
the config."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import copyfile
from statistics import mean, stdev

import pytest
from checkout import ROOT

from qarl.__main__ import main
from qarl.bench.model import MODELS
from qarl.checks.memory import TIGHT
from qarl.checks.memory_parts import GIB
from qarl.config import load_config

sys.path.insert(0, str(ROOT / "scripts"))
from random_models import save_tokenizer
from recipe_plans import Recipe, planned_memory, rows_of, words_of
from stretch_positions import Stretching, stretch

PAGE = (ROOT / "docs/do/paper_runs.md").read_text(encoding="utf-8")
LINES = rows_of(PAGE)
RECIPES = [Recipe.of(line) for line in LINES]
ON_GPU = [recipe for recipe in RECIPES if recipe.gpus]


def name_of(recipe: Recipe) -> str:
    return " ".join(recipe.cells[1:5])


@pytest.fixture(scope="module")
def stretched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], str]:
    """Make the model of a row with more positions from the public config, without weights. Return its folder."""

    @cache
    def make(model: str, positions: int) -> str:
        folder = tmp_path_factory.mktemp(model)
        copyfile(MODELS / model / "config.json", folder / "config.json")
        vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        save_tokenizer(folder, vocabulary)
        stretch(Stretching(folder, folder / "stretched", positions))
        return str(folder / "stretched")

    return lambda recipe: make(recipe.model, int(recipe.config.model.path.rpartition("-")[2]))


@pytest.mark.verl
@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_the_dry_run_of_every_row(
    recipe: Recipe,
    stretched: Callable[[Recipe], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, cells = recipe.config, recipe.cells
    command = words_of(cells)
    local = config.model.path.startswith("models/") and "positions" in cells[1]
    if local:
        command[command.index(f"model.path={config.model.path}")] = (
            f"model.path={stretched(recipe)}"
        )
    assert (config.quant.scheme, config.quant.align) == tuple(cells[3:5])
    correction = " + TIS" if config.rollout_correction.rollout_is == "token" else ""
    bypass = " + bypass" if config.rollout_correction.bypass_mode else ""
    adapters = f" + LoRA {config.lora.r}" if config.lora.r else ""
    assert f"{config.actor.loss}{correction}{bypass}{adapters}" == cells[2]
    assert main(["train", *command, "dry_run=true", f"output_dir={tmp_path}"]) == 0
    told = capsys.readouterr().err
    assert "nothing was trained" in told
    assert not local or "\nerror: " not in f"\n{told}"


@pytest.mark.parametrize("recipe", ON_GPU, ids=name_of)
def test_the_plan_fits_and_no_score_is_claimed(recipe: Recipe) -> None:
    config, trainer = recipe.config, recipe.config.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node if config.backend == "verl" else 1
    assert recipe.gpus == ranks
    plan = recipe.memory()
    assert plan.peak[1] < TIGHT * recipe.gib * GIB
    # vLLM starts only if the longest sequence fits.
    assert plan.kv_tokens >= config.data.max_prompt_length + config.data.max_response_length
    assert recipe.cells[5] == "never run" and not recipe.cells[6]


@pytest.mark.parametrize("line", LINES, ids=[name_of(recipe) for recipe in RECIPES])
def test_seconds_and_gib_are_those_of_the_plan(line: str) -> None:
    assert line == Recipe.of(line).predicted(), "python scripts/recipe_plans.py rewrites them"


def test_the_small_recipe_fits_16_gb_as_the_page_says() -> None:
    gib = 15.6  # as drivers report
    said = re.search(r"of\s16\sGB\sadd\s`([^`]+)`", PAGE)
    assert said is not None
    config = load_config(["config=qwen2_5_0_5b_gsm8k_w4a16.yaml", *said[1].split()])
    assert planned_memory(config, "Qwen2.5-0.5B", gib).peak[1] < TIGHT * gib * GIB


def test_runs_have_names_of_their_own() -> None:
    names = [recipe.config.name for recipe in ON_GPU]
    assert len(set(names)) == len(names) == 36


def test_cpu_rows_are_those_of_the_results() -> None:
    saved = json.loads(
        (ROOT / "benchmarks/results/ablate_schemes_cpu.json").read_text(encoding="utf-8")
    )
    arms = {frozenset(settings.items()): name for name, settings in saved["arms"].items()}
    for row in (recipe.cells for recipe in RECIPES if not recipe.gpus):
        wanted = {"quant.align": row[4], "actor.loss": row[2]} | (
            {"quant.scheme": "bf16"} if row[3] == "bf16" else {}
        )
        arm = arms[frozenset(wanted.items())]
        scores = [100 * run["accuracy_after"] for run in saved["runs"] if run["arm"] == arm]
        assert row[
            6
        ] == f"{max(run['abs_max'] for run in saved['runs'] if run['arm'] == arm):.2g}".replace(
            "e-0", "e-"
        )
        assert row[5] == f"{mean(scores):.1f}% ± {stdev(scores):.1f}%"
