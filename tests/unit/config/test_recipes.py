"""Each row of the table of recipes and baselines in docs/do/paper_runs.md: its dry run, and what it says of
the config."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from statistics import mean, stdev

import pytest
from checkout import ROOT

from qarl.__main__ import main
from qarl.checks.machine import GPUS
from qarl.checks.memory import TIGHT, estimate
from qarl.checks.memory_parts import GIB
from qarl.checks.model_size import ModelSize
from qarl.config import Config, load_config
from qarl.kernels.cuda.vllm_linears import VllmMarlinLinear
from qarl.kernels.triton.linears import TritonW4A16Linear

PAGE = (ROOT / "docs/do/paper_runs.md").read_text(encoding="utf-8")
LINES = PAGE.partition("\n| hardware |")[2].partition("\n\n")[0].splitlines()[2:]
ROWS = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in LINES]
ON_GPU = [row for row in ROWS if "CPU" not in row[0]]


def words(row: list[str]) -> list[str]:
    return shlex.split(row[-1].strip("`"))[2:]


def peak_gib(config: Config, model: str, gib: float) -> float:
    folder = ROOT / "qarl/bench/models" / model
    size = ModelSize.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    # FSDP2 gathers what Marlin reads, layer by layer; the local trainer has a copy of every layer that it trains.
    kernels = dict.fromkeys(
        size.linears().values(),
        VllmMarlinLinear if config.backend == "local" else TritonW4A16Linear,
    )
    plan = estimate(
        size,
        config,
        device="cuda",
        gpu_memory_bytes=int(gib * GIB),
        kernels=kernels,
    )
    return plan.peak[1] / GIB


@pytest.mark.verl
@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[1:5]))
def test_the_dry_run_of_every_row(
    row: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(words(row))
    assert (config.quant.scheme, config.quant.align) == tuple(row[3:5])
    correction = " + TIS" if config.rollout_correction.rollout_is == "token" else ""
    adapters = f" + LoRA {config.lora.r}" if config.lora.r else ""
    assert f"{config.actor.loss}{correction}{adapters}" == row[2]
    assert main(["train", *words(row), "dry_run=true", f"output_dir={tmp_path}"]) == 0
    assert "nothing was trained" in capsys.readouterr().err


@pytest.mark.parametrize("row", ON_GPU, ids=lambda row: " ".join(row[1:5]))
def test_the_plan_fits_and_no_score_is_claimed(row: list[str]) -> None:
    config, (number, _, gpu) = load_config(words(row)), row[0].split()
    assert int(number) == (config.trainer.n_gpus_per_node if config.backend == "verl" else 1)
    peak = peak_gib(config, row[1], GPUS[gpu][1])
    assert row[8] == f"{peak:.0f}" and peak < TIGHT * GPUS[gpu][1]
    assert row[5] == "never run" and not row[6]


def test_the_small_recipe_fits_16_gb_as_the_page_says() -> None:
    gib = 15.6  # as drivers report
    said = re.search(r"of\s16\sGB\sadd\s`([^`]+)`", PAGE)
    assert said is not None
    config = load_config(["config=qwen2_5_0_5b_gsm8k_w4a16.yaml", *said[1].split()])
    assert peak_gib(config, "Qwen2.5-0.5B", gib) < TIGHT * gib


def test_runs_have_names_of_their_own() -> None:
    names = [load_config(words(row)).name for row in ON_GPU]
    assert len(set(names)) == len(names) == 23


def test_cpu_rows_are_those_of_the_results() -> None:
    saved = json.loads(
        (ROOT / "benchmarks/results/ablate_schemes_cpu.json").read_text(encoding="utf-8")
    )
    arms = {frozenset(settings.items()): name for name, settings in saved["arms"].items()}
    for row in ROWS[: len(ROWS) - len(ON_GPU)]:
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
