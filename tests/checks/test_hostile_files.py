"""Every kind of file that is read, with content that nobody would write on purpose: always a UserError."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from bad_runs import edit_model_config
from checkpoint_state import CONFIG

from qarl.checkpoint.export import ExportRequest, export
from qarl.checkpoint.open import open_source, read_config
from qarl.checkpoint.run_folder import METRICS_FILE
from qarl.checkpoint.verl_shards import Rank, VerlWeights, whole_and_torn
from qarl.checks.eos import eos_warnings
from qarl.checks.layers import meta_model
from qarl.checks.model_folder import compared_tensors, load_tokenizer, weight_files
from qarl.data import load_prompts
from qarl.data.rewards import get_reward_fn
from qarl.errors import UserError
from qarl.metrics.tracker import Tracker, read_metrics
from qarl.train import main
from qarl.trainer.resume import is_finished

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


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize("kind", CONTENT)
def test_data_files(tmp_path: Path, tokenizer: Any, kind: str, suffix: str) -> None:
    file = fill(tmp_path / f"train{suffix}", kind)
    with pytest.raises(UserError, match="train"):
        load_prompts(str(file), tokenizer=tokenizer, max_prompt_length=9)


def test_an_empty_parquet(tmp_path: Path, tokenizer: Any) -> None:
    columns = {key: pyarrow.array([], pyarrow.string()) for key in ROW}
    for table in (columns, {}, {"a": pyarrow.array([], pyarrow.int64())}):
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "train.parquet")
        with pytest.raises(UserError, match=r"has no rows[\s\S]*train.parquet"):
            load_prompts(str(tmp_path / "train.parquet"), tokenizer=tokenizer, max_prompt_length=9)


VALUES: dict[str, Any] = {"text": "a", "number": 3, "list": ["a"], "bool": True, "list of pairs": [["a", "b"]]}
CELLS = [(column, kind) for column in ("extra_info", "reward_model", "prompt", "data_source") for kind in VALUES]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(("column", "kind"), [cell for cell in CELLS if cell != ("data_source", "text")])
def test_cells_of_another_type(tmp_path: Path, tokenizer: Any, column: str, kind: str, suffix: str) -> None:
    file, row = tmp_path / f"train{suffix}", ROW | {column: VALUES[kind]}
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"row 0[\s\S]*"):
        load_prompts(str(file), tokenizer=tokenizer, max_prompt_length=9)


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


@pytest.mark.parametrize("kind", [kind for kind in CONTENT if kind != "a folder"])
def test_metrics_are_read_past_what_is_none(tmp_path: Path, kind: str) -> None:
    content = CONTENT[kind]
    assert content is not None
    lines = b'{"step": 1, "a": 1}\n' + content.replace(b"\n", b"") + b'\n{"step": 2, "a": "nan"}\n'
    (tmp_path / METRICS_FILE).write_bytes(lines + b'{"step": 3, "a": "x"}\n{"step": 1e400}\n')
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1, 2]
    with Tracker(tmp_path, [], 5, {}, start_step=2) as tracker:
        tracker.log({"a": 3.0}, step=3)
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("kind", CONTENT)
def test_a_summary_of_any_content_is_no_finished_run(tmp_path: Path, kind: str) -> None:
    fill(tmp_path / "summary.json", kind)
    assert is_finished(tmp_path) is False


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


SHARDS: dict[str, Callable[[Path], None]] = {
    "malicious": lambda path: torch.save({"a": Malicious()}, path),
    "a list": lambda path: torch.save([torch.ones(2)], path),
    "numbers": lambda path: torch.save({"a": 3}, path),
    "a text": lambda path: torch.save("x", path),
    "no names": lambda path: torch.save({"a": {"b": torch.ones(2)}}, path),
}


@pytest.mark.parametrize("kind", SHARDS)
def test_shards_of_another_content(verl_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    SHARDS[kind](actor(verl_run) / SHARD)
    with pytest.raises(UserError, match=r"weights of a rank cannot be read[\s\S]*world_size_1_rank_0.pt") as caught:
        export_of(verl_run)
    assert "weights_only" not in str(caught.value) and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", CONTENT)
def test_shards_that_are_none(verl_run: Path, kind: str) -> None:
    path = fill(actor(verl_run) / SHARD, kind)
    for call in (lambda: Rank.open(path), lambda: VerlWeights.open(path.parent), lambda: export_of(verl_run)):
        with pytest.raises(UserError):
            call()
    checkpoints = verl_run / "checkpoints"
    whole, torn = whole_and_torn(checkpoints)
    assert whole == {} and list(torn) == [1]


@pytest.mark.parametrize("kind", [kind for kind in CONTENT if kind != "a folder"])
def test_records_of_checksums(verl_run: Path, kind: str) -> None:
    fill(actor(verl_run) / RECORD, kind)
    with pytest.raises(UserError, match=r"record of the checksums|differs from what was saved"):
        export_of(verl_run)


YAML = {
    "tags": b"!!python/object/apply:os.mkdir ['ran']",
    "a tab": b"a:\n\t- b",
    "no quant": b"a: 1",
    "quant a list": b"quant: [1]",
}


@pytest.mark.parametrize("kind", [*CONTENT, *YAML])
def test_the_config_of_a_run(verl_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = verl_run / "config.yaml"
    path.write_bytes(YAML[kind]) if kind in YAML else fill(path, kind)
    with pytest.raises(UserError, match=r"config.yaml|cannot be read"):
        read_config(path)
    with pytest.raises(UserError):
        export_of(verl_run)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "quant", [{}, {"scheme": "x"}, {"scheme": 3}, {"scheme": "w4a16", "group_size": "x"}, {"scheme": "w4a16"}], ids=str
)
def test_a_config_with_another_section_quant(verl_run: Path, quant: dict[str, Any]) -> None:
    (verl_run / "config.yaml").write_text(json.dumps(CONFIG | {"quant": quant}))
    with pytest.raises(UserError):
        export(ExportRequest(verl_run, verl_run.parent / "out"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", CONTENT)
def test_model_files_of_a_verl_checkpoint(verl_run: Path, name: str, kind: str) -> None:
    fill(actor(verl_run) / "huggingface" / name, kind)
    with pytest.raises(UserError):
        export_of(verl_run)


def test_the_checkpoint_of_a_run_that_is_no_folder(tmp_path: Path) -> None:
    for run in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError):
            export(ExportRequest(run, tmp_path / "out"))
    with pytest.raises(UserError):
        open_source(tmp_path / "none")
