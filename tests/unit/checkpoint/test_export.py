"""`python -m qarl.export`: what it writes, what it refuses, and what a full disk leaves. No engine."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_state import whole_state
from random_models import save_random_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.checkpoint import export_adapter, model_files
from qarl.checkpoint.export import ExportRequest, export
from qarl.checkpoint.model_files import (
    ModelFiles,
    limits_of_adapter,
    read_tensors,
    save_model,
    weight_files,
)
from qarl.checkpoint.read_weights import BASE_FILE, Source
from qarl.checkpoint.resumable import open_checkpoint, save_checkpoint, tensor_digest
from qarl.checkpoint.storage import write_json
from qarl.config import OptimConfig
from qarl.config.command_arguments import read_request
from qarl.errors import UserError
from qarl.export import main
from qarl.lora.adapter import PREFIX, WEIGHTS_FILE, A, B, write_adapter
from qarl.quant import get_scheme, packed_state_dict, quantize_model
from qarl.quant.experts import unstacked
from qarl.trainer.master_optimizer import MasterOptimizer

IGNORE = ["lm_head", "re:.*layers\\.1\\.mlp\\..*"]


def make_run(
    folder: Path,
    *,
    family: str = "qwen3",
    tie: bool = False,
    scheme: str = "w4a16",
    master: str = "fp32",
):
    """A run folder with checkpoints of steps 2 and 10, and the model as it was at step 10, quantized."""
    source = save_random_model(folder / "source", family, tie=tie)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    settings = OptimConfig(lr=1e-2, master_dtype=master)
    optimizer = MasterOptimizer(model.named_parameters(), settings, seed=0, total_training_steps=9)
    quantize_model(model, scheme=get_scheme(scheme, group_size=32), ignore=IGNORE)
    tied = {"lm_head.weight"} if tie else set()
    for step in (2, 10):
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.accumulate()
        optimizer.step()
        config = {
            "quant": {"scheme": scheme, "group_size": 32, "ignore": IGNORE},
            "optim": {"master_dtype": master},
        }
        save_checkpoint(
            folder / "run" / "checkpoints" / f"step_{step}",
            files=ModelFiles.of(model, AutoTokenizer.from_pretrained(source)),
            weights=unstacked(
                (name, tensor) for name, tensor in model.state_dict().items() if name not in tied
            ),
            optimizer=optimizer.state_dict(),
            rng={},
            state=whole_state(step=step, config=config | {"trainer": {}}),
        )
    return folder / "run", model, optimizer


def run_export(run: Path, output: Path, *arguments: str) -> str:
    return export(
        read_request(
            ExportRequest, [f"run={run}", f"output={output}", *arguments], example="qarl export"
        )
    )


def digests(tensors) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in tensors}


@pytest.mark.parametrize(
    ("family", "tie", "scheme"),
    [
        (family, tie, scheme)
        for family, tie in (("qwen2", False), ("qwen3", True), ("qwen3_moe", False))
        for scheme in ("w4a16", "w8a8", "fp8", "w4a8")
        if (family, scheme) != ("qwen3_moe", "w4a8")
    ],
)
def test_the_quantized_export_is_what_the_live_model_publishes(tmp_path, scheme, family, tie):
    run, model, _ = make_run(tmp_path, family=family, tie=tie, scheme=scheme)
    message = run_export(run, tmp_path / "out")
    assert "step 10" in message and scheme in message
    assert ("Plain vLLM does not compute w4a8" in message) is (scheme == "w4a8")
    assert ("transformers cannot load this folder" in message) is (family == "qwen3_moe")
    tensors = dict(read_tensors(tmp_path / "out"))
    assert digests(tensors.items()) == digests(packed_state_dict(model))
    assert any(name.endswith("weight_scale") for name in tensors)
    assert not any("layers.1.mlp" in name and name.endswith("weight_scale") for name in tensors)
    assert ("lm_head.weight" in tensors) is not tie
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == get_scheme(scheme, group_size=32).quantization_config(
        IGNORE
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


@pytest.mark.parametrize(
    ("scheme", "experts", "words"),
    [
        ("w4a16", False, []),
        ("w8a8", False, ["without AMX"]),
        ("bf16", True, ["only where QaRL is installed"]),
        ("w8a8", True, ["only where QaRL is installed", "without AMX"]),
    ],
)
def test_an_export_with_an_adapter_says_what_cannot_load_it(scheme, experts, words):
    sentences = limits_of_adapter(get_scheme(scheme), experts=experts)
    assert len(sentences) == len(words) and all(map(str.__contains__, sentences, words))


@pytest.mark.parametrize(("alpha", "factor"), [(16, 2.0), (4, 0.5), (None, 1.0)])
def test_the_adapter_of_a_verl_run_has_its_factor(tmp_path, monkeypatch, alpha, factor):
    """verl's checkpoints have only its tensors. Rank and alpha are those of the run's config; alpha is r by default."""
    write_json(tmp_path / "actor" / BASE_FILE, {"published": {"model.norm.weight": "digest"}})
    name = f"{PREFIX}model.layers.0.self_attn.q_proj"
    tensors = {f"{name}{A}": torch.ones(8, 4), f"{name}{B}": torch.ones(6, 8)}
    config = {"lora": {"r": 8, "alpha": alpha}, "model": {"path": "base"}}
    source = Source(3, config, tmp_path, lambda dtype: iter(tensors.items()))
    monkeypatch.setattr(export_adapter, "open_source", lambda folder, **_: source)
    trained = export_adapter.open_trained(tmp_path)
    assert (trained.step, trained.published) == (3, {"model.norm.weight": "digest"})
    adapter = trained.adapter
    assert (adapter.r, adapter.targets, adapter.base) == (8, ("q_proj",), "base")
    assert adapter.factor == factor


def test_the_adapter_of_a_verl_run_is_exported_as_it_was_published(tmp_path, monkeypatch):
    """Its masters are FP32, and vLLM and the forward multiply by them as BF16: 1 + 2^-7 and not 1 + 2^-8 + 2^-9."""
    write_json(tmp_path / "actor" / BASE_FILE, {"published": {}})
    name = f"{PREFIX}model.layers.0.self_attn.q_proj"
    masters = {f"{name}{A}": torch.full((8, 4), 1 + 2**-8 + 2**-9), f"{name}{B}": torch.ones(6, 8)}
    config = {"lora": {"r": 8, "alpha": 8}, "model": {"path": "base"}}
    source = Source(
        3, config, tmp_path, lambda dtype: ((key, t.to(dtype)) for key, t in masters.items())
    )
    monkeypatch.setattr(export_adapter, "open_source", lambda folder, **_: source)
    write_adapter(tmp_path, export_adapter.open_trained(tmp_path).adapter)
    saved = load_file(tmp_path / WEIGHTS_FILE)
    assert saved.keys() == masters.keys()
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert torch.equal(saved[f"{name}{A}"].float(), torch.full((8, 4), 1 + 2**-7))


def test_an_adapter_whose_base_is_gone(tmp_path, monkeypatch):
    """A folder that has moved is no matter of the Hub, whose client says how to switch its network on."""
    monkeypatch.chdir(tmp_path)
    config = {"lora": {"r": 8}, "model": {"path": "models/base"}, "quant": {"scheme": "bf16"}}
    config["quant"] |= {"group_size": 128, "ignore": []}
    trained = SimpleNamespace(config=config)
    with pytest.raises(UserError, match="the base models/base is not on this machine") as error:
        export_adapter.export_adapter(trained, tmp_path / "out", "quantized", False)
    assert f"there is no folder {tmp_path}/models/base" in error.value.why
    assert "local_files_only" not in str(error.value)
    assert "in which the run was started" in error.value.fix


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_bf16_and_fp32_are_the_masters(tmp_path, family):
    run, model, optimizer = make_run(tmp_path, family=family)
    run_export(run, tmp_path / "bf16", "format=bf16")
    run_export(run, tmp_path / "fp32", "format=fp32")
    masters = optimizer.state_dict()["masters"]
    bf16 = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").state_dict()
    fp32 = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32").state_dict()
    assert bf16.keys() == fp32.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert bf16[name].dtype == torch.bfloat16 and torch.equal(bf16[name], weight)
        assert fp32[name].dtype == torch.float32 and torch.equal(fp32[name], masters[name])
    assert any(
        not torch.equal(fp32[name], weight.float()) for name, weight in model.state_dict().items()
    )


def test_without_fp32_masters_the_error_names_the_way_out(tmp_path):
    run, _, _ = make_run(tmp_path, master="bf16")
    with pytest.raises(UserError, match="no FP32 masters") as caught:
        run_export(run, tmp_path / "out", "format=fp32")
    assert "format=bf16" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_large_models_are_sharded(tmp_path, monkeypatch):
    run, _, _ = make_run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(model_files, "MAX_SHARD_BYTES", 100_000)
        run_export(run, tmp_path / "out", "step=2")
    files = weight_files(tmp_path / "out")
    assert len(files) >= 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(path.stat().st_size < 110_000 for path in files)
    run_export(run, tmp_path / "whole", "step=2")
    assert digests(read_tensors(tmp_path / "out")) == digests(read_tensors(tmp_path / "whole"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for _, t in read_tensors(tmp_path / "whole")
    )


def test_no_more_than_a_shard_is_in_memory(tmp_path, monkeypatch):
    alive: list[weakref.ref] = []
    most = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(40):
            tensor = torch.full((1000,), float(number))
            alive.append(weakref.ref(tensor))
            most = max(most, sum(reference() is not None for reference in alive))
            yield f"t{number}", tensor

    source = save_random_model(tmp_path / "source")
    monkeypatch.setattr(model_files, "MAX_SHARD_BYTES", 20_000)
    save_model(
        tmp_path / "out", ModelFiles.from_folder(source), stream(), scheme=get_scheme("bf16")
    )
    assert dict(read_tensors(tmp_path / "out"))["t39"][0] == 39
    assert most <= 7, "five tensors of a shard, the one that opens the next, and the one being made"


def test_an_output_in_the_way_is_not_touched(tmp_path):
    run, _, _ = make_run(tmp_path)
    (tmp_path / "empty").mkdir()
    run_export(run, tmp_path / "empty")
    with pytest.raises(UserError, match="exists and is no empty folder"):
        run_export(run, tmp_path / "empty", "format=bf16")
    run_export(run, tmp_path / "empty", "format=bf16", "overwrite=true")
    assert "quantization_config" not in json.loads((tmp_path / "empty" / "config.json").read_text())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UserError, match="not a model folder"):
        run_export(run, tmp_path / "mine", "overwrite=true")
    assert (tmp_path / "mine" / "thesis.tex").is_file()
    for output in (
        run,
        run / "checkpoints",
        run / "checkpoints" / "step_10",
        run / "checkpoints" / "step_11",
    ):
        with pytest.raises(UserError, match="would overwrite checkpoints"):
            run_export(run, output, "overwrite=true")
    open_checkpoint(run / "checkpoints" / "step_10")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run=RUN"], "output is missing"),
        (["runs=RUN", "output=x"], r"did you mean run=\.\.\."),
        (["run=RUN", "output=x", "format=int4"], "format=int4: Input should be 'quantized'"),
        (["run=RUN", "output=x", "step=3"], "choose from step=2, step=10"),
        (["run=EMPTY", "output=x"], "has no checkpoints"),
        (["run=CHECKPOINT", "output=x"], r"fix: write run=\S+/run step=2$"),
        (["run=CHECKPOINTS", "output=x"], r"fix: write run=\S+/run step=10$"),
        (["run=nowhere", "output=x"], "there is no folder nowhere"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)
def test_what_will_not_do_is_one_message(tmp_path, capsys, arguments, expected):
    for step in (2, 10):
        (tmp_path / "run" / "checkpoints" / f"step_{step}").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    checkpoints = tmp_path / "run" / "checkpoints"
    folders = {"RUN": str(tmp_path / "run"), "EMPTY": str(tmp_path / "empty")}
    folders |= {"CHECKPOINT": str(checkpoints / "step_2"), "CHECKPOINTS": str(checkpoints)}
    overrides = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        overrides.append(f"{key}={folders.get(value, value)}")
    assert main(overrides) == 2
    assert re.search(expected, capsys.readouterr().err, re.MULTILINE)
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run=a", "output=b", "output=c"], "output is given twice: b, then c"),
        (["run=", "output=b"], "run has no value"),
    ],
)
def test_a_key_is_given_once_with_a_value(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_request(ExportRequest, arguments, example="qarl export")
