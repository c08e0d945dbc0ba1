"""The section lora: what is refused, each with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_problems import override_problem

from qarl.config import load_config
from qarl.config.lora import REFUSED, LoraConfig

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


@pytest.mark.parametrize("rank", ["4", "-1", "1024", "all"])
def test_ranks_are_vllms(folder: Path, rank: str) -> None:
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
    ("rank", "advice"), [(24, "use 32"), (1000, "use 512"), (2, "use 8"), (65, "use 128")]
)
def test_a_rank_that_vllm_lacks_is_answered_with_the_next(
    folder: Path, rank: int, advice: str
) -> None:
    problem = override_problem(f"lora.r={rank}")
    assert advice in problem.fix
    assert "1, 8, 16, 32" in problem.reason


@pytest.mark.parametrize(
    "target", [".*proj", "q_proj|v_proj", "self_attn.q_proj", "re:.*", "[qv]_proj", "q_proj,v_proj"]
)
def test_a_pattern_is_no_target(folder: Path, target: str) -> None:
    problem = override_problem(R8, f"lora.target_modules=['{target}']")
    assert problem.key == "lora.target_modules"
    assert f"{target} is no name" in problem.reason
