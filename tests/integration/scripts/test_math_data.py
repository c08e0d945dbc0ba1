"""Data preparation: what is kept, changed and left out, on small files made here, and what verl makes of the result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkout import ROOT

from qarl.data.prompts import load_prompts
from qarl.errors import UserError

sys.path.insert(0, str(ROOT / "scripts"))
import math_data
import math_text as text
import prepare_math_eval
import prepare_openr1_math


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def evaluate(output: Path, *arguments: str) -> int:
    return prepare_math_eval.main(["--output", str(output), "--workers", "1", *arguments])


def train(output: Path, *arguments: str) -> int:
    return prepare_openr1_math.main(["--output", str(output), "--workers", "1", *arguments])


def report_of(path: Path) -> dict[str, Any]:
    return json.loads(path.with_suffix(".report.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        ("204", "204"),
        (" $x+1$. ", "x+1"),
        ("$27$ or $38$", "27 or 38"),
        ("\\[\\frac{1}{2}\\]", "\\frac{1}{2}"),
        ("\\$18", "\\$18"),
        (["$2$", "$\\frac{3}{4}$"], "2, \\frac{3}{4}"),
        ({"style": "rule", "ground_truth": "7"}, "7"),
        ("\N{MINUS SIGN}3", "-3"),
        ("\N{SQUARE ROOT}13", "\\sqrt{13}"),
        ("first \\boxed{3}, so in the end $\\boxed{5}$.", "5"),
        ("$\\boxed{2}$, $\\boxed{3}$ and \\boxed{\\frac{1}{4}}", "2, 3, \\frac{1}{4}"),
    ],
)
def test_answers_become_one_box_that_the_reward_accepts(raw: Any, answer: str) -> None:
    assert text.answer_text(raw) == answer
    assert text.answer_text(answer) == answer
    assert text.verifies_itself(answer)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (None, "no reference answer"),
        ("\\boxed{3", "unbalanced"),
        ("We argue as follows. " * 20, "longer than 300"),
    ],
)
def test_unusable_answers_say_why(raw: Any, reason: str) -> None:
    with pytest.raises(text.RowError, match=reason):
        text.answer_text(raw)


def test_a_reward_that_raises_or_runs_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward answers 0 if its five seconds are over: a busy machine keeps the rows of a quiet one."""
    monkeypatch.setattr(text, "math_verify", lambda *arguments: 0.0)
    assert text.verifies_itself("\\frac{1}{2}") and not text.verifies_itself("\\text{}")
    monkeypatch.setattr(text, "math_verify", lambda *arguments: 1 / 0)
    assert not text.verifies_itself("1")


def test_training_set_counts_everything_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = [
        {"problem": "What is $2+2$?", "answer": "4"},
        {"problem": "Prove it.", "answer": None},
    ]
    published.append({"problem": "Say nothing.", "answer": "\\text{}"})
    held_out = write_jsonl(tmp_path / "held_out.jsonl", published)
    assert evaluate(tmp_path / "eval", "--sets", "math500", "--file", f"math500={held_out}") == 0
    source = write_jsonl(
        tmp_path / "source.jsonl",
        [
            {"problem": "What is 3+3?", "answer": "6", "other": [1]},
            {"problem": "what is 2 + 2 ?", "answer": "4"},
            {"problem": "", "answer": "1"},
            {"problem": "No answer", "answer": None},
            {"answer": "5"},
            {"problem": "What is 3 + 3?", "answer": "$6$"},
            {"problem": "What is 3 + 3 ?", "answer": "7"},
            {
                "problem": "\N{GREEK SMALL LETTER ALPHA} = \N{SQUARE ROOT}2, cafe\N{COMBINING ACUTE ACCENT}?",
                "answer": "\\sqrt{2}",
            },
            {"problem": "Cut off", "answer": "\\frac{1}{"},
            {"problem": "Rubbish", "answer": "\\text{}"},
            {"problem": "prove  it", "answer": "1"},
            {"problem": "say nothing", "answer": "2"},
        ],
    )
    output = tmp_path / "train.parquet"
    arguments = ["--file", str(source), "--eval", str(tmp_path / "eval")]
    assert train(output, *arguments) == 2  # five sets are not there
    assert "evaluation set aime24 is not in" in capsys.readouterr().err and not output.exists()
    assert train(output, *arguments, "--eval-sets", "math500") == 0
    rows = pq.read_table(output).to_pylist()
    assert [row["extra_info"] for row in rows] == [
        {"split": "train", "index": 0, "source_row": 0},
        {"split": "train", "index": 1, "source_row": 7},
    ]
    assert rows[1]["data_source"] == "openr1_math"
    assert rows[1]["reward_model"] == {"style": "rule", "ground_truth": "\\sqrt{2}"}
    problem = (
        "\N{GREEK SMALL LETTER ALPHA} = \N{SQUARE ROOT}2, caf\N{LATIN SMALL LETTER E WITH ACUTE}?"
    )
    instruction = "Please reason step by step, and put your final answer within \\boxed{}."
    assert rows[1]["prompt"] == [{"role": "user", "content": f"{problem}\n\n{instruction}"}]
    report = report_of(output)
    assert report["dropped"] == {
        "duplicate": 1,
        "duplicate with another answer, the first one kept": 1,
        "in evaluation set math500": 3,
        "no problem text": 2,
        "no reference answer": 1,
        "reference answer does not verify": 1,
        "unbalanced braces in the reference answer": 1,
    }
    assert report["evaluation_sets"] == {"math500": 3}
    assert report["rows_read"] == 12 == report["rows_written"] + sum(report["dropped"].values())
    assert report["first_dropped_source_rows"]["no problem text"] == [2, 4]


def test_openr1_layout_and_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The published columns: chat messages with a system prompt, the answer in reward_model. Two files, by workers."""
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "Think."},
                {"role": "user", "content": f"What is {i}+{i}?"},
            ],
            "reward_model": {"ground_truth": str(2 * i), "style": "rule"},
        }
        for i in range(20)
    ]
    monkeypatch.setattr(math_data, "BATCH", 16)
    for name, part in (("b", rows[18:]), ("a", rows[:18])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / f"{name}.parquet")
    outputs = [tmp_path / name / "train.parquet" for name in ("one", "two")]
    for output, workers in zip(outputs, "12", strict=True):
        assert train(output, "--file", str(tmp_path), "--no-eval", "--workers", workers) == 0
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    written = pq.read_table(outputs[0]).to_pylist()
    assert len(written) == 20 and len(written[-1]["prompt"]) == 1
    assert written[-1]["prompt"][0]["content"].startswith("What is 19+19?\n\n")
    assert written[-1]["reward_model"]["ground_truth"] == "38"


def test_evaluation_sets_keep_duplicates_and_count_them(tmp_path: Path) -> None:
    first = write_jsonl(
        tmp_path / "1.jsonl", [{"problem": p, "answer": 1} for p in ("p?", "q?", "P ?")]
    )
    second = write_jsonl(tmp_path / "2.jsonl", [{"problem": p, "answer": 1} for p in ("q?", "r?")])
    arguments = [
        "--sets",
        "aime24",
        "minerva",
        "--file",
        f"aime24={first}",
        "--file",
        f"minerva={second}",
    ]
    assert evaluate(tmp_path / "eval", *arguments, "--samples", "minerva=4") == 0
    rows = {
        name: pq.read_table(tmp_path / "eval" / f"{name}.parquet").to_pylist()
        for name in ("aime24", "minerva")
    }
    assert [len(table) for table in rows.values()] == [3, 2]
    assert {row["__rollout_n__"] for row in rows["aime24"]} == {32}
    assert {row["__rollout_n__"] for row in rows["minerva"]} == {4}
    assert {row["data_source"] for row in rows["minerva"]} == {"minerva"}
    assert report_of(tmp_path / "eval" / "aime24.parquet")["problems_also_in"] == {"aime24": 1}
    assert report_of(tmp_path / "eval" / "minerva.parquet")["problems_also_in"] == {"aime24": 1}
    assert {path.name for path in (tmp_path / "eval").iterdir()} == {
        f"{name}.{ending}" for name in rows for ending in ("parquet", "report.json", "keys")
    }


FILES = {
    "good.jsonl": b'{"problem": "p", "answer": "1"}\n',
    "cut.jsonl": b'{"problem": "p", "answer": "1"}\n{"problem": "p',
    "empty.jsonl": b"\n",
    "text.jsonl": b'{"text": "p", "answer": "1"}\n',
    "unanswered.jsonl": b'{"problem": "p", "answer": ""}\n',
    "lfs.parquet": b"version https://git-lfs",
    "a.csv": b"problem,answer\n",
}


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (train, "--no-eval --file cut.jsonl", "line 2 is not a JSON object"),
        (train, "--no-eval --file empty.jsonl", "no rows"),
        (train, "--no-eval --file text.jsonl", "no column with the problem"),
        (train, "--no-eval --file unanswered.jsonl", "no row is left"),
        (train, "--no-eval --file lfs.parquet", "cannot read"),
        (train, "--no-eval --file a.csv", "there is no .parquet"),
        (train, "--no-eval --file good.jsonl --answer-column x", "looked for x"),
        (train, "--file good.jsonl --eval none", "prepare_math_eval.py"),
        (evaluate, "--sets amc --file aime24=good.jsonl", "the sets to prepare are amc"),
        (evaluate, "--sets amc --samples amc=0", "not a number of responses"),
    ],
)
def test_unusable_files_and_arguments_are_user_errors(
    function: Any, arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    assert function(Path("out/train.parquet"), *arguments.split()) == 2
    error = capsys.readouterr().err
    assert "error: " in error and message in error
    assert not list(Path("out").rglob("*.*"))


def test_a_streamed_hub_set_is_read_by_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` itself, given a set in memory for the one on the Hub; then the Hub cannot be reached."""
    import datasets

    asked: dict[str, Any] = {}

    def load(name: str, subset: str | None, **more: Any) -> Any:
        asked.update(more, name=name, subset=subset)
        rows = {"question": ["q?"], "answer": [7], "context": ["unused"]}
        return datasets.Dataset.from_dict(rows).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = math_data.Source("some/set@abc", subset="en", split="test")
    rows = list(math_data.problems(source, math_data.Counts(), workers=1))
    assert [(item.row, item.problem, item.answer) for item in rows] == [(0, "q?", "7")]
    assert asked == {
        "name": "some/set",
        "subset": "en",
        "split": "test",
        "revision": "abc",
        "streaming": True,
    }
    monkeypatch.setattr(
        datasets, "load_dataset", mock.Mock(side_effect=ConnectionError("no network"))
    )
    with pytest.raises(UserError, match=r"(?s)some/set.*no network.*offline"):
        list(math_data.problems(source, math_data.Counts(), workers=1))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("math")
    files = []
    for name, count in (("aime24", 2), ("math500", 3)):
        rows = [{"problem": f"{name} {i}", "answer": str(i)} for i in range(count)]
        files += ["--file", f"{name}={write_jsonl(folder / f'{name}.jsonl', rows)}"]
    assert (
        evaluate(folder / "eval", "--sets", "aime24", "math500", *files, "--samples", "aime24=4")
        == 0
    )
    return folder


def test_the_local_backend_reads_them(prepared: Path, pristine_model: Path) -> None:
    from transformers import AutoTokenizer

    files = [str(path) for path in sorted((prepared / "eval").glob("*.parquet"))]
    prompts = load_prompts(
        files, tokenizer=AutoTokenizer.from_pretrained(pristine_model), max_prompt_length=64
    )
    assert [(p.data_source, p.ground_truth) for p in prompts] == [
        ("aime24", "0"), ("aime24", "1"), ("math500", "0"), ("math500", "1"), ("math500", "2"),
    ]  # fmt: skip


@pytest.mark.verl
def test_verl_reads_them_and_samples_by_row(prepared: Path, pristine_model: Path) -> None:
    """verl's dataset, collation and batch give each prompt its own number of responses."""
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.utils import tensordict_utils
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    files = [str(path) for path in sorted((prepared / "eval").glob("*.parquet"))]
    config = OmegaConf.create(
        {
            "cache_dir": str(prepared / "cache"),
            "filter_overlong_prompts": False,
            "max_prompt_length": 64,
        }
    )
    dataset = RLHFDataset(files, AutoTokenizer.from_pretrained(pristine_model), config)
    batch = collate_fn([dataset[i] for i in range(len(dataset))])
    sent = tensordict_utils.get_tensordict(batch)
    assert [sent[i]["__rollout_n__"] for i in range(len(dataset))] == [4, 4, 1, 1, 1]


def test_gsm8k_has_the_number_behind_the_marks(tmp_path: Path) -> None:
    """Both files of the recipe's config, from local rows."""
    import prepare_gsm8k

    rows = [{"question": "How many?", "answer": "6 * 200 = <<6*200=1200>>1200\n#### 1,200"}]
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert prepare_gsm8k.main(["--output", str(tmp_path), "--train", file, "--test", file]) == 0
    for split in ("train", "test"):
        (row,) = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        assert row["reward_model"]["ground_truth"] == "1200" and row["extra_info"]["split"] == split
        assert row["data_source"] == "gsm8k" and "How many?" in row["prompt"][-1]["content"]
