"""`qarl eval tasks=...` on made-up tasks: the values are those of lm_eval called by hand in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from checkout import ROOT
from cpu_features import needs_w4a16_cpu
from datasets import load_dataset

from qarl.__main__ import main
from qarl.checkpoint.model_files import ModelFiles, linears_of, packed, read_tensors, write_model
from qarl.eval.harness import sets_of
from qarl.schemes import get_scheme

BF16 = Path("models/tiny-qwen3")
needs_lm_eval = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason='lm_eval is missing: pip install "qarl[lm-eval]"'
)
BY_HAND = """
import json, os, sys
os.environ |= {"VLLM_CPU_INT4_W4A8": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
import torch
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()  # without it vLLM's kernels end with an illegal instruction
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
folder, include_path, *tasks = sys.argv[1:]
arguments = {"pretrained": folder, "max_model_len": 256, "enforce_eager": True, "kv_cache_memory_bytes": 2**28}
results = simple_evaluate("vllm", arguments, tasks=tasks, task_manager=TaskManager(include_path=include_path),
                          apply_chat_template=True)
print("\\nRESULT" + json.dumps(results["results"]))
os._exit(0)
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Eight of the model's sums: to choose the right one of four, and to write it at the end of the worked columns."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    problems = load_dataset(
        "parquet", data_files=str(ROOT / "data/column_addition/test.parquet"), split="train[:8]"
    )
    truths = [int(problem["reward_model"]["ground_truth"]) for problem in problems]
    rows = [
        {"question": problem["prompt"][0]["content"], "choices": [str(truth + i) for i in range(4)]}
        for problem, truth in zip(problems, truths, strict=True)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "rows.jsonl")},
            "cache_dir": str(tmp_path / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choose = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 0}
    choose["metric_list"] = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_norm")
    ]
    write = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "metric_list": [{"metric": "exact_match"}],
    }
    write["generation_kwargs"] = {"until": ["<|user|>"], "max_gen_toks": 80, "do_sample": False}
    last = [
        {"function": "regex", "regex_pattern": r"(\d+)", "group_select": -1},
        {"function": "take_first"},
    ]
    write["filter_list"] = [{"name": "last", "filter": last}]
    for name, task in (("sums_choose", choose), ("sums_write", write)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(base | task | {"task": name}))
    return folder


@pytest.mark.vllm
@needs_w4a16_cpu
@needs_lm_eval
@pytest.mark.usefixtures("in_the_checkout")
def test_a_quantized_model_beside_bf16(
    tasks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scheme, export, output = (
        get_scheme("w4a16", group_size=32),
        tmp_path / "export",
        tmp_path / "scores.json",
    )
    export.mkdir()
    tensors = packed(read_tensors(BF16), scheme, linears_of(BF16, scheme, ["lm_head"]))
    write_model(export, ModelFiles.from_folder(BF16), tensors, scheme=scheme, ignore=["lm_head"])
    names = ["sums_choose", "sums_write"]
    command = [
        "eval",
        str(export),
        f"include_path={tasks}",
        "apply_chat_template=true",
        f"against={BF16}",
        f"output={output}",
    ]
    assert main([*command, f"tasks={','.join(names)}"]) == 0
    assert "| sums_choose acc | 8 | " in capfd.readouterr().out
    scores = json.loads(output.read_text())["scores"]
    assert scores.keys() == {
        "sums_choose acc",
        "sums_choose acc_norm",
        "sums_write exact_match,last",
    }
    metadata = (
        tmp_path / "metadata" / f"vllm-{version('vllm-cpu')}+cpu.dist-info/METADATA"
    )  # lm_eval asks for `vllm`
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    paths = [str(tmp_path / "metadata"), *sys.path]
    for folder in (export, BF16):
        words = [sys.executable, "-c", BY_HAND, str(folder), str(tasks), *names]
        done = subprocess.run(
            words, env=os.environ | {"PYTHONPATH": ":".join(paths)}, capture_output=True, text=True
        )
        line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
        assert line is not None, done.stderr[-3000:]
        by_hand = json.loads(line.removeprefix("RESULT"))
        for name, row in scores.items():
            task, metric = name.split()
            said = by_hand[task][metric if "," in metric else f"{metric},none"]
            assert row[str(folder)]["mean"] == pytest.approx(said), name
            assert row[str(folder)]["low"] < row[str(folder)]["high"] and "difference" in row
    assert scores["sums_write exact_match,last"][str(BF16)]["mean"] > 0, (
        "it writes two of five right; quantized, few"
    )


@needs_lm_eval
@pytest.mark.usefixtures("in_the_checkout")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tasks=arc_chalenge"], "did you mean arc_challenge?"),
        (["tasks=arc_challenge", "n=4"], "n has no effect with tasks"),
        (["files=a.parquet", "num_fewshot=5"], "num_fewshot has no effect without tasks"),
    ],
)
def test_wrong_arguments(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(BF16), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qarl.eval.harness.find_spec", lambda name: None)
    (tmp_path / "config.json").write_text("{}")
    assert main(["eval", str(tmp_path), "tasks=arc_challenge"]) == 2
    assert 'pip install "qarl[lm-eval]"' in capsys.readouterr().err


def test_groups_are_pooled_and_other_aggregates_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A tag has no metric of its own, so its tasks are shown; a perplexity is made of pairs."""

    def sample(value: float) -> dict[str, object]:
        return {"filter": "none", "metrics": ["acc", "ppl"], "acc": value, "ppl": (value, 1)}

    results = {
        "samples": {"a": [sample(1.0), sample(0.0)], "b": [sample(1.0)]},
        "group_subtasks": {"group": ["a", "tag"], "tag": ["b"]},
        "groups": {"group": {}},
        "results": {
            name: {"acc,none": mean, "ppl,none": 3.0}
            for name, mean in (("group", 2 / 3), ("a", 0.5), ("b", 1.0))
        },
    }
    assert sets_of(results, ["group", "tag"]) == {
        "group acc": {0: 1.0, 1: 0.0, 2: 1.0},
        "b acc": {0: 1.0},
    }
    assert "group ppl,none: 3.0; not in the table" in capsys.readouterr().err
