"""The paper's configs: the published values, every scheme by override, and sizes that divide as verl needs them to.

The layer sizes are those of the models' public config.json files, written here by hand.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from qarl.config import Config, load_config
from qarl.quant.matcher import is_ignored

ROOT = Path(__file__).resolve().parents[1]

# Input widths of the linear layers that tensor parallelism does not split, and of those it does (o_proj, down_proj),
# and the positions the model was trained for.
MODELS = {
    "qwen2_5_math_1_5b_w4a16": ([1536], [12 * 128, 8960], 4096),
    "qwen2_5_math_7b_w4a16": ([3584], [28 * 128, 18944], 4096),
    "qwen3_8b_w4a16": ([4096], [32 * 128, 12288], 32768),
    "qwen3_30b_w4a16": ([2048], [32 * 128, 768], 32768),
}


@pytest.fixture(params=MODELS)
def config(request: pytest.FixtureRequest) -> Config:
    return load_config([f"config={ROOT / 'configs' / request.param}.yaml"])


def test_published_values(config: Config) -> None:
    actor = config.actor
    assert (actor.seq_clip_ratio_high, actor.neg_seq_clip_ratio_low, actor.neg_seq_clip_ratio_high) == (
        4e-4,
        3e-4,
        7e-4,
    )
    assert actor.seq_tis_imp_ratio_cap == 2.0
    assert (config.quant.scheme, config.quant.group_size) == ("w4a16", 128)
    assert config.backend == "verl"


@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "fp8"])
def test_other_schemes_by_override(config: Config, scheme: str) -> None:
    path = ROOT / "configs" / f"{config.name}.yaml"
    assert load_config([f"config={path}", f"quant.scheme={scheme}", "name=other"]).quant.scheme == scheme


def test_batches_divide_over_the_gpus(config: Config) -> None:
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert gpus % config.rollout.tensor_model_parallel_size == 0
    responses_per_gpu, rest = divmod(config.actor.ppo_mini_batch_size * config.rollout.n, gpus)
    assert rest == 0
    assert responses_per_gpu % config.actor.ppo_micro_batch_size_per_gpu == 0
    step_per_gpu, rest = divmod(config.data.train_batch_size * config.rollout.n, gpus)
    assert rest == 0
    assert step_per_gpu % config.actor.log_prob_micro_batch_size_per_gpu == 0


def test_groups_are_whole_on_every_gpu(config: Config) -> None:
    whole, split, positions = MODELS[config.name]
    shards = config.rollout.tensor_model_parallel_size
    assert all(width % config.quant.group_size == 0 for width in whole)
    assert all(width % (shards * config.quant.group_size) == 0 for width in split)
    assert config.data.max_prompt_length + config.data.max_response_length <= positions


def test_routers_stay_out(config: Config) -> None:
    gate, up = (f"model.layers.3.mlp.{name}" for name in ("gate", "gate_proj"))
    assert is_ignored(gate, config.quant.ignore) == (config.name == "qwen3_30b_w4a16")
    assert not is_ignored(up, config.quant.ignore)


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


def test_the_page_about_them_knows_them_all() -> None:
    page = (ROOT / "docs" / "configs.md").read_text(encoding="utf-8")
    assert [name for name in MODELS if f"`{name}.yaml`" not in page] == []
    shipped = {path.stem for path in (ROOT / "configs").glob("qwen*.yaml")}
    assert shipped == set(MODELS)
