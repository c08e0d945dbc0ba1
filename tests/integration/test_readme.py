"""The README: short; its three ways in work as printed; figures are those of the results."""

from __future__ import annotations

import json
import re
import shlex
from statistics import mean
from typing import Any

import pytest
import yaml
from checkout import ROOT

from qarl.config import build_config

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks/results"
STATUS = "measured|tested|only its config is tested|compiled and interpreted only|never run on a GPU|not supported"


def snippet(language: str) -> str:
    """The one code block of a language."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    return str(code)


def test_the_config_is_one() -> None:
    """Keys that the YAML leaves out have defaults; both backends take it."""
    values = yaml.safe_load(snippet("yaml"))
    config = build_config(values)
    assert config.quant.scheme == "w4a16" and config.backend == "local"
    assert build_config(values | {"backend": "verl"}).backend == "verl"


@pytest.mark.verl
def test_the_command_line_of_verl_is_one() -> None:
    """Hydra composes it: every key exists, and the group gives what TBPO and the quantized actor need."""
    pytest.importorskip("verl")
    from hydra import compose, initialize_config_module

    blocks = re.findall(r"^```\w*\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    command = next(text for text in blocks if "main_ppo" in text)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words[3:])
    actor = config.actor_rollout_ref.actor
    assert actor.fsdp_config.quant.scheme == "w4a16" and actor.policy_loss.loss_mode == "tbpo"
    assert config.algorithm.adv_estimator == "grpo" and config.data.train_files == "train.parquet"


def test_the_loop_is_that_of_the_example() -> None:
    """Each line stands in examples/own_loop.py, in this order, though it may be wrapped there; the example is run by
    tests/integration/test_examples.py."""
    example = without_whitespace((ROOT / "examples/own_loop.py").read_text(encoding="utf-8"))
    place = 0
    for line in snippet("python").splitlines():
        position = example.find(without_whitespace(line), place)
        assert position > 0, line
        place = position


def without_whitespace(text: str) -> str:
    return "".join(text.split())


def figure(value: float) -> str:
    """Two digits, as the table prints them: 1.7e-2."""
    if not value:
        return "0"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def runs_of(file: str, name: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((RESULTS / file).read_text(encoding="utf-8"))["runs"][
        name
    ]
    return runs


@pytest.mark.parametrize(
    ("row", "file", "name"),
    [
        ("`quant.align=off`", "linears_cpu.json", "w4a16-off"),
        ("`quant.align=linears`", "linears_cpu.json", "w4a16-linears"),
        ("`quant.scheme=bf16 quant.align=off`", "linears_cpu.json", "bf16"),
    ],
)
def test_the_table_is_that_of_the_results(row: str, file: str, name: str) -> None:
    runs = runs_of(file, name)
    line = next(line for line in README.splitlines() if line.startswith(f"| {row}"))
    mismatch, k3, accuracy = (cell.strip() for cell in line.strip("|").split("|")[1:])
    assert mismatch == figure(mean(run["mismatch_abs_mean"] for run in runs))
    assert k3 == figure(mean(run["mismatch_k3_mean"] for run in runs))
    before, after = (mean(run[f"accuracy_{when}"] for run in runs) for when in ("before", "after"))
    assert accuracy.startswith(f"{before:.1%} to {after:.1%}")


def test_the_default_is_that_of_the_results() -> None:
    """Seed 0 is the quickstart's own run."""
    quickstart = json.loads((RESULTS / "quickstart_cpu.json").read_text(encoding="utf-8"))[
        "summary"
    ]
    runs = [quickstart, *runs_of("seeds_model_cpu.json", "w4a16-model")]
    assert {(run["mismatch_abs_mean"], run["mismatch_k3_mean"]) for run in runs} == {(0, 0)}
    before, after = (mean(run[f"accuracy_{when}"] for run in runs) for when in ("before", "after"))
    row = (
        f"| `quant.align=model`: the default | 0 | 0 | {before:.1%} to {after:.1%} (three seeds) |"
    )
    assert row in README.splitlines()
