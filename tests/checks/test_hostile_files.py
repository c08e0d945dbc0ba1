"""Every kind of file that is read, with content that nobody would write on purpose: always a UserError."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_runs import edit_model_config

from qarl.checkpoint.export import ExportRequest, export
from qarl.checkpoint.open import open_source
from qarl.checks.eos import eos_warnings
from qarl.checks.layers import meta_model
from qarl.checks.model_folder import compared_tensors, load_tokenizer, weight_files
from qarl.data.rewards import get_reward_fn
from qarl.errors import UserError
from qarl.train import main

DEEP = b"[" * 100_000
CONTENT: dict[str, bytes | None] = {
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "zeros": bytes(4096),
    "cut short": b'{"a": ',
    "a list": b"[1, 2]",
    "a number": b"1",
    "null": b"null",
    "deep": DEEP,
    "deep and closed": b'{"a":' * 30_000 + b"1" + b"}" * 30_000,
    "a long number": b'{"eos_token_id": ' + b"9" * 10_000 + b"}",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "a folder": None,
}


def fill(path: Path, kind: str) -> Path:
    """`path` with that content, in place of what was there."""
    if path.exists():
        path.unlink()
    content = CONTENT[kind]
    path.mkdir() if content is None else path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def tokenizer(pristine_model: Path) -> Any:
    return load_tokenizer(str(pristine_model))[0]


ROW: dict[str, Any] = {
    "data_source": "x",
    "prompt": [{"role": "user", "content": "t3"}],
    "reward_model": {"ground_truth": "1"},
}


def load_model_files(folder: Path) -> None:
    tokenizer, hf_config = load_tokenizer(str(folder))
    eos_warnings(str(folder), tokenizer, hf_config)
    files = weight_files(str(folder))
    compared_tensors(files, meta_model(hf_config))


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
@pytest.mark.parametrize("kind", CONTENT)
def test_model_files(pristine_model: Path, tmp_path: Path, name: str, kind: str) -> None:
    if (name, kind) == ("tokenizer_config.json", "a folder"):
        pytest.skip("transformers takes the file for missing, and needs none")
    copy = Path(shutil.copytree(pristine_model, tmp_path / "model"))
    fill(copy / name, kind)
    with pytest.raises(UserError):
        load_model_files(copy)


@pytest.mark.parametrize("value", [-1, 0, "x", None, [1], {}], ids=repr)
@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "rope_parameters"]
)
def test_keys_of_config_json(pristine_model: Path, tmp_path: Path, key: str, value: Any) -> None:
    copy = Path(shutil.copytree(pristine_model, tmp_path / "model"))
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(content | {key: value}))
    try:
        load_model_files(copy)
    except UserError:
        return
    assert key == "rope_parameters" and value in (None, {})  # the defaults of the family


ODD_CONFIGS: list[tuple[str, Any]] = [
    ("return_dict", False),
    ("return_dict", None),
    ("output_attentions", True),
    ("text_config", "silu"),
    ("quantization_config", "gptq"),
    ("quantization_config", [1]),
    ("architectures", 5),
    ("rope_parameters", {"rope_type": ["default"]}),
    ("rope_parameters", {"rope_type": {"a": 1}}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": {}}),
    ("rope_parameters", {"rope_type": "yarn", "factor": "x", "original_max_position_embeddings": 128}),
    ("layer_types", [["full_attention"]]),
    ("max_position_embeddings", "x"),
    ("_attn_implementation", 0.5),
    ("base_model_tp_plan", "1"),
]


@pytest.mark.parametrize("scheme", ["w4a16", "bf16"])
@pytest.mark.parametrize(("key", "value"), ODD_CONFIGS, ids=repr)
def test_odd_configs_of_a_model_are_refused_before_the_engine_starts(
    startable_run: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any, scheme: str
) -> None:
    """Keys that no table of attention or rotary embeddings has: transformers uses them, or its loader does."""
    edit_model_config(**{key: value})
    assert main(["config=run.yaml", f"quant.scheme={scheme}"]) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and "model" in said and "fix: " in said, said


INDEXES: list[Any] = [{}, [], 3, {"weight_map": []}, {"weight_map": 3}, {"weight_map": {"a": 5}}, {"weight_map": {}}]


@pytest.mark.parametrize("content", INDEXES, ids=str)
def test_an_index_of_shards_of_another_content(
    startable_run: Path, capsys: pytest.CaptureFixture[str], content: Any
) -> None:
    """Which exception transformers raises depends on the content."""
    Path("model/model.safetensors").rename("model/model-00001-of-00001.safetensors")
    Path("model/model.safetensors.index.json").write_text(json.dumps(content))
    assert main(["config=run.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and "model.path" in said and "fix: " in said, said


REWARDS: dict[str, str | bytes] = {
    "binary": bytes(range(256)),
    "syntax": "def f(:",
    "deep": "(" * 5000 + ")" * 5000,
    "null bytes": b"def f(**k): return 1\n\0",
    "endless recursion": "def g(): g()\ng()",
    "exits": "raise SystemExit(0)",
    "not UTF-8": b"x = '\xff\xfe'\ndef f(**k): return 1",
}


@pytest.mark.parametrize("kind", REWARDS)
def test_reward_files(tmp_path: Path, kind: str) -> None:
    content = REWARDS[kind]
    (tmp_path / "r.py").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"cannot load .*r.py"):
        get_reward_fn(f"{tmp_path}/r.py:f")


# Files of a verl run.

SHARD = "model_world_size_1_rank_0.pt"
RECORD = "qarl_state_world_size_1_rank_0.json"


@pytest.fixture
def verl_run(pristine_model: Path, tmp_path: Path) -> Path:
    """A run of verl's with one whole checkpoint of one rank."""
    step = tmp_path / "run" / "checkpoints" / "global_step_1"
    (step / "actor" / "huggingface").mkdir(parents=True)
    weights = {"model.norm.weight": torch.ones(4)}
    torch.save(weights, step / "actor" / SHARD)
    torch.save({}, step / "data.pt")
    for file in pristine_model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, step / "actor" / "huggingface" / file.name)
    config = "quant: {scheme: bf16, group_size: 32, ignore: [lm_head]}\n"
    (tmp_path / "run" / "config.yaml").write_text(config)
    return tmp_path / "run"


def export_of(run: Path) -> str:
    return export(ExportRequest(run, run.parent / "out", format="bf16"))


def actor(run: Path) -> Path:
    return run / "checkpoints" / "global_step_1" / "actor"


def test_the_run_of_verl_is_exported_as_it_is(verl_run: Path) -> None:
    assert "step 1" in export_of(verl_run)


class Malicious:
    def __reduce__(self) -> Any:
        return (exec, ("open('ran', 'w')",))


def test_the_checkpoint_of_a_run_that_is_no_folder(tmp_path: Path) -> None:
    for run in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError):
            export(ExportRequest(run, tmp_path / "out"))
    with pytest.raises(UserError):
        open_source(tmp_path / "none")
