"""The paper's configs beside the paper's table of hyperparameters (arXiv 2604.07853, appendix B), line by line.

Each value equals the table's or is one of `DEVIATIONS`.
The rest: memory, and the files that the scripts write.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from qarl.checks.machine import GPUS
from qarl.checks.memory import TIGHT, MemoryEstimate, estimate
from qarl.checks.memory_parts import GIB
from qarl.checks.model_size import ModelSize
from qarl.config import Config, load_config
from qarl.kernels.triton.linears import TritonW4A16Linear
from qarl.verl.config import verl_keys

MODELS = {
    "qwen2_5_math_1_5b_w4a16": "Qwen2.5-Math-1.5B",
    "qwen2_5_math_7b_w4a16": "Qwen2.5-Math-7B",
    "qwen3_8b_w4a16": "Qwen3-8B",
    "qwen3_30b_w4a16": "Qwen3-30B-A3B",
}
"""Name of a config -> the public config of its model, which the package carries."""


@dataclass(frozen=True)
class Row:
    """One line of the paper's table: its key and value, ours, and verl's own key if ours has another meaning."""

    paper: str
    value: Any
    ours: str | None
    verl: str


# The table's lines in its order. Its keys are verl's, abridged, but for TBPO's and the optimizer's type.
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TABLE = [
    Row("trainer.nnodes", 1, "trainer.nnodes", "trainer.nnodes"),
    Row("trainer.n_gpu_per_node", 8, "trainer.n_gpus_per_node", "trainer.n_gpus_per_node"),
    Row("data.train_batch_size", 512, "data.train_batch_size", "data.train_batch_size"),
    Row("data.max_prompt_length", 2048, "data.max_prompt_length", "data.max_prompt_length"),
    Row("data.max_response_length", 16384, "data.max_response_length", "data.max_response_length"),
    Row("rollout.n", 8, "rollout.n", f"{ROLLOUT}.n"),
    Row("rollout.temperature", 1.0, "rollout.temperature", f"{ROLLOUT}.temperature"),
    Row("rollout.top_p", 1.0, "rollout.top_p", f"{ROLLOUT}.top_p"),
    Row(
        "val_kwargs.temperature",
        0.6,
        "rollout.val_temperature",
        f"{ROLLOUT}.val_kwargs.temperature",
    ),
    Row(
        "actor.ppo_mini_batch_size", 64, "actor.ppo_mini_batch_size", f"{ACTOR}.ppo_mini_batch_size"
    ),
    Row(
        "actor.ppo_max_token_len_per_gpu",
        22528,
        "actor.ppo_max_token_len_per_gpu",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
    ),
    Row("optim.opt_type", "Muon", "optim.name", ""),
    Row("optim.lr", 1e-6, "optim.lr", f"{ACTOR}.optim.lr"),
    Row("optim.weight_decay", 0.01, "optim.weight_decay", f"{ACTOR}.optim.weight_decay"),
    Row("actor.use_kl_loss", False, None, f"{ACTOR}.use_kl_loss"),
    *(
        Row(f"actor.{name}", value, f"actor.{name}", f"+{ACTOR}.policy_loss.{name}")
        for name, value in (
            ("seq_clip_ratio_high", 0.0004),
            ("seq_clip_ratio_low", 0.0003),
            ("neg_seq_clip_ratio_high", 0.0007),
            ("neg_seq_clip_ratio_low", 0.0003),
            ("seq_tis_imp_ratio_cap", 2),
        )
    ),
]
MATH = {"data.max_prompt_length": 1024, "data.max_response_length": 3072}
DEVIATIONS: dict[str, dict[str, Any]] = {
    "qwen2_5_math_1_5b_w4a16": MATH,
    "qwen2_5_math_7b_w4a16": MATH,
}


def path_of(name: str) -> Path:
    return ROOT / "configs" / f"{name}.yaml"


@pytest.fixture(params=MODELS)
def config(request: pytest.FixtureRequest) -> Config:
    return load_config([f"config={path_of(request.param)}"])


def value_of(config: Config, row: Row) -> Any:
    """Our value of a line of the table; without a key of ours, what nobody sets stays at verl's default."""
    if row.ours is None:
        assert row.verl not in config.verl
        return row.value
    section, key = row.ours.split(".")
    value = getattr(getattr(config, section), key)
    return value.capitalize() if value == "muon" else value


def test_every_line_of_the_papers_table(config: Config) -> None:
    for row in TABLE:
        assert value_of(config, row) == DEVIATIONS.get(config.name, {}).get(
            row.ours or "", row.value
        ), row.paper


def test_verl_gets_the_same_values(config: Config) -> None:
    keys = verl_keys(config, on_cpu=False)
    for row in TABLE:
        if row.ours == "optim.name":  # verl has no such key, but names a class
            assert keys[f"{ACTOR}.optim.optimizer"] == "MuonAdamW"
            continue
        assert keys.get(row.verl, row.value) == value_of(config, row), row.paper
        assert (row.verl in keys) == (row.ours is not None), row.paper


def test_the_page_shows_the_same_table() -> None:
    """docs/do/paper_runs.md: the paper's key and value, and each config's, in bold if it is another."""
    configs = {name: load_config([f"config={path_of(name)}"]) for name in MODELS}
    expected = []
    for row in TABLE:
        if (
            row.ours == "optim.lr"
        ):  # the paper names one rate, with Muon; ours has two, and both stand on the page
            muon = [cell(row, config.optim.muon_lr) for config in configs.values()]
            expected.append(
                ["`optim.lr`: Muon's rate, `optim.muon_lr` in QaRL", shown(row.value), *muon]
            )
            others = [shown(config.optim.lr) for config in configs.values()]
            expected.append(["`optim.lr`: the rate of the other parameters", "not given", *others])
            continue
        ours = [cell(row, value_of(config, row)) for config in configs.values()]
        expected.append([f"`{row.paper}`", shown(row.value), *ours])
    assert page_table("paper_runs", "the paper's key") == expected


def shown(value: Any) -> str:
    return str(value).replace("e-0", "e-")


def cell(row: Row, value: Any) -> str:
    return shown(row.value) if value == row.value else f"**{shown(value)}**"


def page_table(name: str, first: str) -> list[list[str]]:
    """The rows of the table whose first heading is `first`, on a page of docs/do."""
    page = (ROOT / f"docs/do/{name}.md").read_text(encoding="utf-8")
    lines = page.partition(f"\n| {first} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[text.strip() for text in line.strip().strip("|").split("|")] for line in lines]


def public_size(name: str) -> ModelSize:
    folder = ROOT / "qarl" / "bench" / "models" / MODELS[name]
    return ModelSize.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def plan(config: Config) -> MemoryEstimate:
    size = public_size(config.name)
    return estimate(
        size,
        config,
        device="cuda",
        gpu_memory_bytes=int(GPUS["h100"][1] * GIB),
        kernels=dict.fromkeys(size.linears().values(), TritonW4A16Linear),
    )


def peak_gib(config: Config) -> float:
    return plan(config).peak[1] / GIB


def test_the_page_shows_the_plan(config: Config) -> None:
    column = 1 + list(MODELS).index(config.name)
    rows = page_table("memory", "term, per GPU")
    memory = plan(config)
    shown = {row[0]: row[column] for row in rows if row[column]}
    parts = {
        part.name: f"{part.bytes / GIB:.1f}" for part in memory.parts if "update" in part.phases
    }
    assert shown == parts | {"together": f"{memory.total('update') / GIB:.1f}"}


def test_a_gpu_of_80_gb_has_room(config: Config) -> None:
    """By qarl.checks.memory's estimate, with a tenth to spare for fragmentation; the page gives the figures."""
    page = {row[0]: row for row in page_table("memory", "model | state per GPU")}
    model = config.model.path.removeprefix("Qwen/")
    assert page[model][-1] == f"{peak_gib(config):.0f} GiB"
    assert peak_gib(config) < TIGHT * GPUS["h100"][1]


def test_muons_rate_moves_an_element_as_adamw_would(config: Config) -> None:
    wanted = 0.2 * config.optim.lr * public_size(config.name).hidden ** 0.5
    assert config.optim.muon_lr == pytest.approx(wanted, rel=0.01)


def test_files_are_those_the_scripts_write(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    evaluation = importlib.import_module("prepare_math_eval")
    training = importlib.import_module("prepare_openr1_math")
    folder = evaluation.parse_arguments([]).output
    assert config.data.val_files == [str(folder / f"{name}.parquet") for name in evaluation.SETS]
    assert config.data.train_files == [str(training.parse_arguments([]).output)]
    assert training.parse_arguments([]).eval == folder
    # Several responses to a problem are worth having only if they can differ.
    assert config.rollout.val_temperature > 0
