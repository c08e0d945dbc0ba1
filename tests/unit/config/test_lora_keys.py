"""The section lora: what is refused, each with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from config_problems import override_problem

from qarl.config import load_config
from qarl.config.lora import RANKS, REFUSED, LoraConfig, engine_rank, is_target

R8 = "lora.r=8"
PARALLEL = "rollout.tensor_model_parallel_size"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_settings_of_peft_are_refused_by_name(folder: Path, name: str) -> None:
    problem = override_problem(f"lora.{name}=1", R8)
    assert f"lora.{name}" in problem.reason and REFUSED[name] in problem.reason
    assert problem.fix == f"remove lora.{name}"


@pytest.mark.parametrize(("theirs", "ours"), [("lora_alpha", "alpha"), ("rank", "r")])
def test_other_names_of_keys_are_answered_with_ours(folder: Path, theirs: str, ours: str) -> None:
    assert override_problem(f"lora.{theirs}=8").fix == f"write lora.{ours}"


def test_dropout_has_pefts_name_too(folder: Path) -> None:
    assert REFUSED["dropout"] in override_problem("lora.lora_dropout=0.1", R8).reason


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["backend=verl", f"{PARALLEL}=2"], PARALLEL, "those of a whole engine"),
        (["model.dtype=fp16", "quant.scheme=bf16"], "model.dtype", "BF16"),
        (["optim.master_dtype=bf16"], "optim.master_dtype", "FP32 masters"),
        (["quant.align=off"], "quant.align", "only in w4a16"),
        (["lora.alpha=12"], "lora.alpha", "not a power of two"),
        (["lora.target_modules=[q_proj,lm_head]"], "lora.target_modules", "lm_head"),
        (["lora.target_modules=[embed_tokens]"], "lora.target_modules", "embed_tokens"),
    ],
)
def test_what_adapters_do_not_go_with(
    folder: Path, overrides: list[str], key: str, words: str
) -> None:
    problem = override_problem(R8, *overrides)
    assert problem.key == key and words in problem.reason


@pytest.mark.parametrize("rank", ["-1", "1024", "all", "1.5", "true"])
def test_ranks_are_whole_numbers_up_to_512(folder: Path, rank: str) -> None:
    assert override_problem(f"lora.r={rank}").key == "lora.r"


@pytest.mark.parametrize("argument", ["lora.alpha=16", "lora.target_modules=[q_proj]"])
def test_keys_without_a_rank_have_no_effect(folder: Path, argument: str) -> None:
    assert "lora.r" in override_problem(argument).fix


def test_no_rank_trains_all_weights(folder: Path) -> None:
    assert not load_config(["config=minimal.yaml", "lora.r=null"]).lora.r
    assert not load_config(["config=minimal.yaml"]).lora.r


@pytest.mark.parametrize(("r", "alpha", "factor"), [(8, None, 1.0), (8, 16, 2.0), (32, 8, 0.25)])
def test_the_factor_is_alpha_over_r(r: int, alpha: int | None, factor: float) -> None:
    assert LoraConfig(r=r, alpha=alpha).factor == factor


@pytest.mark.parametrize(
    ("rank", "engines"), [(1, 1), (2, 8), (8, 8), (9, 16), (24, 32), (65, 128), (321, 512)]
)
def test_the_engines_rank_is_the_next_that_vllm_has(folder: Path, rank: int, engines: int) -> None:
    assert load_config(["config=minimal.yaml", f"lora.r={rank}"]).lora.r == rank
    assert engine_rank(rank) == engines


def test_the_ranks_are_those_of_vllm() -> None:
    lora = pytest.importorskip("vllm.config.lora")
    assert get_args(lora.MaxLoRARanks) == RANKS


def test_a_rank_above_vllms_is_refused_with_the_largest(folder: Path) -> None:
    problem = override_problem("lora.r=513")
    assert "at most rank 512" in problem.reason and "512 or less" in problem.fix


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        ("['re:.*']", "no prefix"),
        ("['q_proj,v_proj']", "several names are a list"),
        ("'q_proj, v_proj'", "several names are a list"),
        ("['.*q_proj', v_proj]", "stands alone"),
        ("'.*(q_proj'", "not a regular expression"),
    ],
)
def test_what_is_no_target(folder: Path, targets: str, why: str) -> None:
    problem = override_problem(R8, f"lora.target_modules={targets}")
    assert problem.key == "lora.target_modules" and why in problem.reason


NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.v_proj",
    "model.layers.11.self_attn.q_proj",
    "model.layers.1.mlp.gate_proj",
    "q_proj",
    "model.layers.1.mlp.agate_proj",
]


@pytest.mark.parametrize(
    "targets",
    [
        ["q_proj"],
        ["self_attn.q_proj", "gate_proj"],
        ["model.layers.1.mlp.gate_proj"],
        r".*layers[.][01][.].*(q|v)_proj",
        r".*\.(q_proj|gate_proj)",
        "[a-z]_proj",
        ".*",
    ],
    ids=str,
)
def test_targets_choose_what_peft_chooses(targets: str | list[str]) -> None:
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import check_target_module_exists

    theirs = peft.LoraConfig(target_modules=targets)
    ours = LoraConfig(r=8, target_modules=targets).target_modules
    assert [is_target(name, ours) for name in NAMES] == [
        bool(check_target_module_exists(theirs, name)) for name in NAMES
    ]
