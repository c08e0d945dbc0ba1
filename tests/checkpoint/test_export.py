"""`python -m qarl.export`: what it writes, what it refuses, and what a full disk leaves. No engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from checkpoint_state import whole_state
from random_models import save_random_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.checkpoint.compressed_tensors import (
    ModelFiles,
    linears_of,
    packed_bytes,
    read_tensors,
    save_model,
    tensor_shapes,
    weight_files,
)
from qarl.checkpoint.export import export, read_request
from qarl.checkpoint.folder import open_checkpoint, save_checkpoint, tensor_digest
from qarl.config import OptimConfig
from qarl.errors import UserError
from qarl.export import main
from qarl.quant import get_scheme, packed_state_dict, quantize_model
from qarl.quant.expert_names import unstacked
from qarl.trainer.optim import MasterOptimizer

IGNORE = ["lm_head", "re:.*layers\\.1\\.mlp\\..*"]


def make_run(folder: Path, *, family: str = "qwen3", tie: bool = False, scheme: str = "w4a16", master: str = "fp32"):
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
            weights=unstacked((name, tensor) for name, tensor in model.state_dict().items() if name not in tied),
            optimizer=optimizer.state_dict(),
            rng={},
            state=whole_state(step=step, config=config | {"trainer": {}}),
        )
    return folder / "run", model, optimizer


def run_export(run: Path, output: Path, *arguments: str) -> str:
    return export(read_request([f"run={run}", f"output={output}", *arguments]))


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
    assert config["quantization_config"] == get_scheme(scheme, group_size=32).quantization_config(IGNORE)
    folder = run / "checkpoints" / "step_10"
    expected = sum(tensor.nbytes for tensor in tensors.values())
    scheme = get_scheme(scheme, group_size=32)
    assert packed_bytes(tensor_shapes(folder), scheme, linears_of(folder, scheme, IGNORE)) == expected
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.mark.parametrize(
    ("scheme", "problem", "name"),
    [
        ("w4a16", "missing_keys", "model.layers.0.mlp.experts.gate_up_proj"),
        ("w8a8", "unexpected_keys", "model.layers.0.mlp.experts.gate_up_proj_scale"),
        ("fp8", "unexpected_keys", "model.layers.0.mlp.experts.gate_up_proj_scale"),
    ],
)
def test_transformers_does_not_read_quantized_experts(tmp_path, scheme, problem, name):
    """If this fails, transformers may have learned to. Then docs/running.md and the export's line are stale."""
    for family, complete in (("qwen3", True), ("qwen3_moe", False)):
        run, _, _ = make_run(tmp_path / family, family=family, scheme=scheme)
        run_export(run, tmp_path / family / "out")
        _, told = AutoModelForCausalLM.from_pretrained(tmp_path / family / "out", output_loading_info=True)
        assert any(told.values()) is not complete
        assert (name in told[problem]) is not complete


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
    assert any(not torch.equal(fp32[name], weight.float()) for name, weight in model.state_dict().items())


def test_fp32_of_a_tied_model_has_no_second_copy(tmp_path):
    run, _, optimizer = make_run(tmp_path, tie=True)
    run_export(run, tmp_path / "fp32", "format=fp32")
    assert dict(read_tensors(tmp_path / "fp32")).keys() == optimizer.state_dict()["masters"].keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_without_fp32_masters_the_error_names_the_way_out(tmp_path):
    run, _, _ = make_run(tmp_path, master="bf16")
    with pytest.raises(UserError, match="no FP32 masters") as caught:
        run_export(run, tmp_path / "out", "format=fp32")
    assert "format=bf16" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_bf16_run_exports_an_ordinary_checkpoint(tmp_path):
    run, model, _ = make_run(tmp_path, scheme="bf16")
    run_export(run, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert digests(read_tensors(tmp_path / "out")) == digests(model.state_dict().items())


def test_large_models_are_sharded(tmp_path):
    run, _, _ = make_run(tmp_path)
    run_export(run, tmp_path / "out", "step=2", "max_shard_size=100KB")
    files = weight_files(tmp_path / "out")
    assert len(files) >= 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(path.stat().st_size < 110_000 for path in files)
    run_export(run, tmp_path / "whole", "step=2")
    assert digests(read_tensors(tmp_path / "out")) == digests(read_tensors(tmp_path / "whole"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for _, t in read_tensors(tmp_path / "whole"))
    prompt = torch.tensor([[3, 5, 8]])
    with torch.no_grad():
        sharded, whole = (
            AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)(prompt).logits
            for name in ("out", "whole")
        )
    assert torch.equal(sharded, whole)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("100", 100), ("2KB", 2_000), ("3 MB", 3_000_000), ("5GB", 5_000_000_000), ("1.5KiB", 1536), ("1GiB", 2**30)],
)
def test_sizes_of_shards_have_the_usual_units(text, expected):
    assert read_request(["run=r", "output=o", f"max_shard_size={text}"]).max_shard_bytes == expected


def test_no_more_than_a_shard_is_in_memory(tmp_path):
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
    save_model(
        tmp_path / "out", ModelFiles.from_folder(source), stream(), scheme=get_scheme("bf16"), max_shard_bytes=20_000
    )
    assert dict(read_tensors(tmp_path / "out"))["t39"][0] == 39
    assert most <= 7, "five tensors of a shard, the one that opens the next, and the one being made"


def test_an_output_in_the_way_is_not_touched(tmp_path):
    run, _, _ = make_run(tmp_path)
    (tmp_path / "empty").mkdir()
    run_export(run, tmp_path / "empty")
    with pytest.raises(UserError, match="exists and is not empty"):
        run_export(run, tmp_path / "empty", "format=bf16")
    run_export(run, tmp_path / "empty", "format=bf16", "overwrite=true")
    assert "quantization_config" not in json.loads((tmp_path / "empty" / "config.json").read_text())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UserError, match="not a model folder"):
        run_export(run, tmp_path / "mine", "overwrite=true")
    for output in (run, run / "checkpoints", run / "checkpoints" / "step_10", run / "checkpoints" / "step_11"):
        with pytest.raises(UserError, match="would overwrite checkpoints"):
            run_export(run, output, "overwrite=true")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        run_export(run, tmp_path / "file")
    open_checkpoint(run / "checkpoints" / "step_10")


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    run, _, _ = make_run(tmp_path)
    path = run / "checkpoints" / "step_10" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bytes of model\.safetensors"):
        run_export(run, tmp_path / "out")
    run_export(run, tmp_path / "out", "step=2")


_LIMITED = """
import resource, sys
from qarl.export import main
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("existing", [False, True], ids=["new", "overwriting"])
def test_a_full_disk_leaves_no_half_folder(tmp_path, existing):
    """In a process whose file size limit the export runs into: a write that the operating system refuses."""
    run, _, _ = make_run(tmp_path)
    output = tmp_path / "out"
    before = {}
    if existing:
        run_export(run, output, "format=bf16")
        before = digests(read_tensors(output))
    arguments = [f"run={run}", f"output={output}", "overwrite=true"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.run(
        [sys.executable, "-c", _LIMITED, *arguments], capture_output=True, text=True, env=environment
    )
    assert process.returncode == 2, process.stderr
    assert "could not be written" in process.stderr and "File too large" in process.stderr
    assert "Traceback" not in process.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"] * existing + ["run", "source"]
    assert digests(read_tensors(output)) == before if existing else not output.exists()
    open_checkpoint(run / "checkpoints" / "step_10")
    run_export(run, output, "overwrite=true")


def test_no_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    run, _, _ = make_run(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(UserError, match=r"no room for .*out"):
        run_export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run=RUN"], "output missing"),
        (["runs=RUN", "output=x"], r"did you mean run=\.\.\."),
        (["run=RUN", "output=x", "format=int4"], "not one of quantized, bf16, fp32"),
        (["run=RUN", "output=x", "step=last"], "step=last is not a step"),
        (["run=RUN", "output=x", "step=3"], "choose from step=2, step=10"),
        (["run=RUN", "output=x", "max_shard_size=0"], "not a size"),
        (["run=RUN", "output=x", "overwrite=yes"], "not one of true, false"),
        (["run=nowhere", "output=x"], "there is no run folder nowhere"),
        (["run=EMPTY", "output=x"], "has no checkpoints"),
        (["run=CHECKPOINT", "output=x"], r"is a checkpoint, not a run\n.*run=.*/run step=10"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)
def test_what_will_not_do_is_one_message(tmp_path, capsys, arguments, expected):
    for step in (2, 10):
        (tmp_path / "run" / "checkpoints" / f"step_{step}").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    folders = {"RUN": str(tmp_path / "run"), "EMPTY": str(tmp_path / "empty")}
    folders["CHECKPOINT"] = str(tmp_path / "run" / "checkpoints" / "step_10")
    given = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        given.append(f"{key}={folders.get(value, value)}")
    assert main(given) == 2
    assert re.search(expected, capsys.readouterr().err)
    assert not Path("x").exists()
