"""A run that begins from an adapter of peft's: what is read, against peft's own forward, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from config_problems import override_problem
from engine_helpers import load_model
from memory_cases import run
from pefts_adapters import TARGETS, save_pefts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qarl.checks.registry import _adapters
from qarl.config import load_config
from qarl.config.errors import ConfigError
from qarl.config.lora import CONFIG_FILE, LoraConfig
from qarl.errors import UserError
from qarl.lora.adapter import WEIGHTS_FILE, write_adapter
from qarl.lora.layers import Adapters
from qarl.schemes import get_scheme

peft = pytest.importorskip("peft")
UNQUANTIZED = get_scheme("bf16")
TOKENS = torch.arange(3, 60)[None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, pristine_model) -> Path:
    return save_pefts(pristine_model, tmp_path_factory.mktemp("peft") / "adapter")


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "adapter")


def changed(folder: Path, **fields: Any) -> Path:
    file = folder / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def begun(model: Path, folder: Path, **options: Any) -> tuple[Any, Adapters]:
    loaded = load_model(model, scheme=UNQUANTIZED)
    config = LoraConfig(path=str(folder))
    return loaded, Adapters(loaded, config, seed=0, base=str(model), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fields",
    [{}, {"r": 3, "lora_alpha": 12}, {"r": 16, "use_rslora": True}, {"target_modules": ["o_proj"]}],
    ids=str,
)
def test_the_start_is_the_adapter_that_peft_has_saved(pristine_model, tmp_path, dtype, fields):
    folder = save_pefts(pristine_model, tmp_path / "theirs", dtype, **fields)
    _, adapters = begun(pristine_model, folder)
    stored = load_file(folder / WEIGHTS_FILE)
    ours = adapters.tensors()
    assert ours.keys() == stored.keys()
    assert all(torch.equal(ours[name].to(dtype), stored[name]) for name in stored)
    (tmp_path / "ours").mkdir()
    write_adapter(tmp_path / "ours", adapters.adapter())
    again = load_file(tmp_path / "ours" / WEIGHTS_FILE)
    assert all(torch.equal(again[name].to(dtype), stored[name]) for name in stored)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.double()


def test_the_forward_is_that_of_peft(pristine_model, saved):
    """In float64 peft computes the exact product of the same numbers. In BF16 both round, in other places."""
    exact = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(pristine_model, dtype=torch.float64), saved
    ).double()
    rounded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(pristine_model, dtype=torch.bfloat16), saved
    )
    model, _ = begun(pristine_model, saved)
    base = load_model(pristine_model, scheme=UNQUANTIZED)
    truth = logits(exact)
    ours, theirs, without = (
        (logits(each) - truth).norm() / truth.norm() for each in (model, rounded, base)
    )
    assert ours < 1.5 * theirs and ours < 0.02 < 0.1 < without


def test_a_factor_that_is_no_power_of_two_goes_into_b_as_in_vllm(pristine_model, tmp_path):
    lora_weights = pytest.importorskip("vllm.lora.lora_weights")
    folder = save_pefts(pristine_model, tmp_path, torch.bfloat16, r=8, lora_alpha=12)
    _, adapters = begun(pristine_model, folder)
    assert (adapters.rank, adapters.alpha) == (8, 8)
    stored = load_file(folder / WEIGHTS_FILE)
    for name, tensor in adapters.tensors().items():
        theirs = stored[name]
        if "lora_B" in name:
            lora = lora_weights.LoRALayerWeights("x", 8, 12, torch.empty(8, 4), theirs)
            theirs = lora.optimize().lora_b
        assert torch.equal(tensor, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masters_start_at_the_numbers_of_the_forward(pristine_model, saved, dtype):
    _, adapters = begun(pristine_model, saved, dtype=dtype)
    stored = load_file(saved / WEIGHTS_FILE)
    for name, tensor in adapters.tensors().items():
        assert tensor.dtype == dtype and torch.equal(tensor.float(), stored[name].float())


def test_numbers_that_bf16_does_not_have_are_rounded_and_told(pristine_model, copied, capfd):
    stored = load_file(copied / WEIGHTS_FILE)
    name = next(name for name in stored if "lora_B" in name)
    save_file(stored | {name: stored[name] * 1.001}, copied / WEIGHTS_FILE)
    _, adapters = begun(pristine_model, copied)
    assert "1 of" in (told := capfd.readouterr().err) and "rounded to BF16" in told
    assert torch.equal(adapters.tensors()[name], (stored[name] * 1.001).bfloat16())


def test_the_config_has_the_settings_of_the_adapter(folder: Path, saved):
    lora = load_config(["config=minimal.yaml", f"lora.path={saved}"]).lora
    assert (lora.r, lora.alpha, lora.target_modules) == (8, 16, sorted(TARGETS))
    same = [
        f"lora.path={saved}",
        "lora.r=8",
        "lora.alpha=16",
        f"lora.target_modules={sorted(TARGETS)}",
    ]
    assert load_config(["config=minimal.yaml", *same]).lora == lora
    for other in ("lora.r=4", "lora.alpha=8", "lora.target_modules=[q_proj]"):
        problem = override_problem(f"lora.path={saved}", other)
        assert problem.key in other and "the adapter in" in problem.reason
        fixed = problem.fix.removeprefix("set ").partition(", or")[0]
        assert load_config(["config=minimal.yaml", f"lora.path={saved}", fixed]).lora == lora


def test_the_order_of_targets_decides_nothing(folder: Path, saved):
    backwards = sorted(TARGETS, reverse=True)
    assert backwards != sorted(TARGETS)
    keys = [f"lora.path={saved}", f"lora.target_modules=[{', '.join(backwards)}]"]
    assert load_config(["config=minimal.yaml", *keys]).lora.target_modules == backwards


def test_a_mistake_elsewhere_is_the_only_problem(folder: Path, saved):
    keys = ["config=minimal.yaml", f"lora.path={saved}", "rollout.n=many"]
    with pytest.raises(ConfigError) as error:
        load_config(keys)
    assert [problem.key for problem in error.value.problems] == ["rollout.n"]
    with pytest.raises(ConfigError) as error:
        load_config([*keys, "lora.r=4"])
    assert [problem.key for problem in error.value.problems] == ["rollout.n", "lora.r"]


def test_verl_has_no_reference_with_the_adapter(folder: Path, saved):
    keys = ["backend=verl", "verl.actor_rollout_ref.actor.use_kl_loss=true"]
    problem = override_problem(f"lora.path={saved}", *keys)
    assert "without the adapter" in problem.reason and "backend=local" in problem.fix


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
        ({"use_dora": True}, "does not serve DoRA"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"modules_to_save": ["lm_head"]}, "modules that were trained whole"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"exclude_modules": ["v_proj"]}, "exclude_modules"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "experts take no adapters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "a base whose weights peft has changed"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"of_a_later_peft": {"on": True}}, "of_a_later_peft"),
        ({"r": 0}, "r=0"),
        ({"r": 513}, "at most rank 512"),
        ({"target_modules": None}, "target_modules=None"),
    ],
)
def test_an_adapter_that_is_more_than_lora_is_refused_by_name(folder, copied, fields, words):
    problem = override_problem(f"lora.path={changed(copied, **fields)}")
    assert words in problem.reason and problem.key.startswith("lora.")


def test_no_folder_of_an_adapter_is_refused_with_the_one_that_is_near(folder, copied):
    assert "there is no folder" in override_problem("lora.path=nowhere").reason
    assert f"lora.path={copied}" in override_problem(f"lora.path={copied.parent}").fix
    (copied / CONFIG_FILE).write_text("{")
    assert "cannot be read" in override_problem(f"lora.path={copied}").reason


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(FIRST) is None, f"{FIRST} is missing"),
        (lambda t: t.update({FIRST: t[FIRST][:4].clone()}), "and should be [8,"),
        (
            lambda t: t.update({"base_model.model.x.lora_A.weight": t[FIRST].clone()}),
            "model.x.lora_A",
        ),
        (
            lambda t: t.update({FIRST.replace("A.w", "A.default.w"): t.pop(FIRST)}),
            "lora_A.default.weight belongs to no linear",
        ),
        (lambda t: t.update({FIRST: t[FIRST] * float("nan")}), "NaN"),
    ],
    ids=["missing", "shape", "extra", "misnamed", "NaN"],
)
def test_tensors_that_do_not_fit_are_named(pristine_model, copied, change, words):
    tensors = load_file(copied / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, copied / WEIGHTS_FILE)
    with pytest.raises(UserError) as error:
        begun(pristine_model, copied)
    assert words in str(error.value)


def test_pickles_are_not_read(pristine_model, copied):
    (copied / WEIGHTS_FILE).rename(copied / "adapter_model.bin")
    with pytest.raises(UserError, match="could run code"):
        begun(pristine_model, copied)


def test_the_checks_compare_the_adapter_with_the_model_before_an_engine(pristine_model, copied):
    model = load_model(pristine_model)
    told, finding = _adapters(run(lora__path=str(copied)), model)
    assert told.status == "warning" and str(pristine_model) in told.what
    assert finding.status == "ok" and "6 linears" in finding.what
    changed(copied, base_model_name_or_path=run().model.path)
    (finding,) = _adapters(run(lora__path=str(copied)), model)
    changed(copied, target_modules=["q_proj"])
    with pytest.raises(UserError, match="belongs to no linear with an adapter"):
        list(_adapters(run(lora__path=str(copied)), model))
