"""`qarl data`: what it writes, and its errors. A stand-in for reasoning-gym gives the problems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qarl.data.entry_text import from_text
from qarl.data.rows import read_rows
from qarl.progress.phases import Phase
from qarl.progress.screen import Display
from qarl.sources.__main__ import main
from qarl.sources.reasoning_gym import _entries

pytestmark = pytest.mark.usefixtures("fake_gym")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def data(*words: str) -> int:
    return main(["reasoning_gym", *words])


def questions(file: str) -> list[str]:
    return [row["prompt"][-1]["content"] for row in read_rows(file)]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert data(*words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_the_files_have_verls_schema_and_unchanged_entries(ending: str) -> None:
    assert data("task=sums", "size=30", "validation=10", f"format={ending}") == 0
    train = read_rows(f"data/sums/train.{ending}")
    validation = read_rows(f"data/sums/validation.{ending}")
    assert (len(train), len(validation)) == (30, 10)
    for split, rows in (("train", train), ("validation", validation)):
        for index, row in enumerate(rows):
            entry = from_text(row["extra_info"]["entry"])
            a, b = entry["metadata"]["pair"]
            assert row["data_source"] == "reasoning_gym/sums"
            assert row["prompt"] == [{"role": "user", "content": f"What is {a} + {b}?"}]
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(a + b)}
            assert row["extra_info"]["split"] == split
            assert row["extra_info"]["index"] == index
            assert type(entry["metadata"]["pair"]) is tuple
            assert entry["metadata"]["by_number"] == {a: "first"}
            assert entry["metadata"]["huge"] == 2**80 + a
            assert type(entry["metadata"]["scalar"]).__name__ == "float64"


def test_no_question_stands_twice() -> None:
    assert data("task=sums", "high=9", "size=70", "validation=30") == 0
    train = questions("data/sums/train.parquet")
    validation = questions("data/sums/validation.parquet")
    assert len({*train, *validation}) == 100


def test_too_few_questions_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "task=sums", "high=9", "size=80", "validation=30")
    assert "sums has only 100 different questions, not the 80 + 30" in message
    assert not Path("data").exists()


def test_the_validation_rows_do_not_depend_on_the_size() -> None:
    assert data("task=sums", "size=10", "validation=20", "out=small") == 0
    assert data("task=sums", "size=99", "validation=20", "out=large") == 0
    assert questions("small/validation.parquet") == questions("large/validation.parquet")
    assert questions("large/train.parquet")[:10] == questions("small/train.parquet")


def test_without_validation_there_is_no_such_file() -> None:
    assert data("task=sums", "size=10", "validation=0") == 0
    assert sorted(path.name for path in Path("data/sums").iterdir()) == [
        "source.json",
        "train.parquet",
    ]


def test_the_same_seed_gives_the_same_bytes_whatever_the_hash_seed(folder: Path) -> None:
    """The stand-in's metadata depend on the hash seed, as those of five tasks do."""
    for number in ("1", "2"):
        words = ["task=sums", "size=20", "validation=5", f"out={number}", "format=jsonl"]
        subprocess.run(
            [sys.executable, "-m", "qarl", "data", "reasoning_gym", *words],
            check=True,
            env=os.environ | {"PYTHONHASHSEED": number, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    for name in ("train.jsonl", "validation.jsonl"):
        assert (folder / "1" / name).read_bytes() == (folder / "2" / name).read_bytes()


def test_another_seed_gives_other_questions() -> None:
    assert data("task=sums", "size=20", "seed=1", "out=a") == 0
    assert data("task=sums", "size=20", "seed=5000", "out=b") == 0
    assert questions("a/train.parquet") != questions("b/train.parquet")


def test_instruction_and_system_text() -> None:
    words = ["instruction=Answer with the number only.", "system=You calculate."]
    assert data("task=sums", "size=3", "validation=1", *words) == 0
    system, user = read_rows("data/sums/train.parquet")[0]["prompt"]
    assert system == {"role": "system", "content": "You calculate."}
    question, instruction = user["content"].split("\n")
    assert question.startswith("What is")
    assert instruction == "Answer with the number only."


def test_a_task_without_right_answers_has_objects_as_ground_truths() -> None:
    assert data("task=open_sums", "size=3", "validation=1") == 0
    for row in read_rows("data/open_sums/train.parquet"):
        assert row["reward_model"]["ground_truth"] == {"answer": ""}


def test_the_problems_that_are_drawn_are_counted_on_the_live_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[tuple[str, str]] = []
    close = Display.close

    def look(display: Display, phase: Phase) -> None:
        shown.append((phase.name, phase.figures()[0]))
        close(display, phase)

    monkeypatch.setattr(Display, "close", look)
    assert data("task=sums", "size=30", "validation=10") == 0
    assert ("drawing problems of sums", "40 of 40 problems") in shown


def test_the_command_says_what_it_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    assert data("task=sums", "size=3", "validation=1") == 0
    told = capsys.readouterr().out
    assert "data/sums/train.parquet: 3 prompts" in told
    assert "data.train_files=data/sums/train.parquet" in told
    assert "data.val_files=data/sums/validation.parquet" in told
    assert "reward.function=reasoning_gym" in told
    record = json.loads(Path("data/sums/source.json").read_text())
    assert record["task"] == "sums"
    assert record["command"] == [
        "qarl",
        "data",
        "reasoning_gym",
        "task=sums",
        "size=3",
        "validation=1",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["task=sms"],
            "reasoning-gym has no task 'sms'\n  where: task\n  fix: did you mean sums, open_sums?",
        ),
        ([], "task is missing"),
        (
            ["task=sums", "scal=3"],
            "the task sums has no parameter scal\n  where: scal=3\n  fix: did you mean scale?",
        ),
        (["task=sums", "validaton=3"], "did you mean validation?"),
        (["task=sums", "high=2.5"], "high=2.5 is not of the type int"),
        (["task=sums", "high=true"], "high=true is not of the type int"),
        (["task=sums", "words=3"], "words=3 is not of the type bool"),
        (["task=sums", "low=5", "high=2"], "AssertionError: high must be at least low"),
        (["task=sums", "answer_in=tag"], "answer_in=tag is no way to find an answer"),
        (["task=sums", "size=0"], "size=0: Input should be greater than 0"),
        (["task=sums", "sums"], "'sums' is not KEY=VALUE"),
        (["task=sums", "task=open_sums"], "task is given twice: sums, then open_sums"),
        (["task=sums", "high=9", "high=8"], "high is given twice: 9, then 8"),
        (["task=sums", "size=9", "size=8"], "size is given twice: 9, then 8"),
    ],
)
def test_a_bad_word_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in refused(capsys, *words)
    assert not Path("data").exists()


def test_an_unknown_source_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasoning-gym", "task=sums"]) == 2
    assert "did you mean reasoning_gym?" in capsys.readouterr().err
    assert main(["task=sums"]) == 2
    assert "write qarl data reasoning_gym task=sums" in capsys.readouterr().err


def test_a_folder_of_others_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("long")
    assert "will not replace mine" in refused(capsys, "task=sums", "out=mine")
    assert Path("mine/thesis.txt").read_text() == "long"
    assert data("task=sums", "size=3", "out=own") == 0
    assert data("task=sums", "size=4", "out=own", "overwrite=true") == 0
    assert len(read_rows("own/train.parquet")) == 4


@pytest.mark.parametrize("word", ["size=4", "seed=2", "high=50", "instruction=Answer."])
def test_data_of_other_arguments_are_not_replaced(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert data("task=sums", "size=3", "low=1", "out=own") == 0
    files = {path: path.read_bytes() for path in Path("own").iterdir()}
    message = refused(
        capsys, "task=sums", "low=1", "out=own", *(["size=3"] if word != "size=4" else []), word
    )
    assert "will not replace own" in message
    assert "qarl data reasoning_gym task=sums size=3 low=1 out=own" in message
    assert "overwrite=true" in message
    assert {path: path.read_bytes() for path in Path("own").iterdir()} == files


def test_data_of_the_same_arguments_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert data("task=sums", "size=3", "low=1", "out=own") == 0
    Path("own/train.parquet").write_bytes(b"marked")
    assert data("out=own", "low=1", "seed=1", "task=sums", "size=3") == 0
    assert "own is up to date" in capsys.readouterr().err
    assert Path("own/train.parquet").read_bytes() == b"marked"
    Path("own/train.parquet").unlink()
    assert data("task=sums", "size=3", "low=1", "out=own") == 0
    assert len(read_rows("own/train.parquet")) == 3


def test_another_version_of_the_tasks_does_not_replace_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert data("task=sums", "size=3") == 0
    monkeypatch.setattr("qarl.sources.reasoning_gym._version", lambda: "another")
    assert "will not replace data/sums" in refused(capsys, "task=sums", "size=3")


def test_a_file_of_the_folders_name_is_refused_before_a_problem_is_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("data").write_text("of the user")
    monkeypatch.setattr(
        "qarl.sources.__main__.split", lambda *words, **keys: pytest.fail("it draws")
    )
    message = refused(capsys, "task=sums", "size=3")
    assert "data/sums could not be written" in message
    assert "data now" in message


def test_other_files_beside_the_data_are_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert data("task=sums", "size=3", "out=own") == 0
    Path("own/test.parquet").write_text("of the user")
    Path("own/.git").mkdir()
    message = refused(capsys, "task=sums", "size=4", "out=own")
    assert "will not replace own" in message
    assert ".git, test.parquet" in message
    assert Path("own/test.parquet").read_text() == "of the user"
    assert len(read_rows("own/train.parquet")) == 3


def children() -> set[int]:
    """Return the processes that this one has started, of earlier tests too."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_ctrl_c_does_not_reach_the_process_that_draws() -> None:
    """A terminal sends SIGINT to a whole group. The process would show a traceback beside `interrupted`."""
    before = children()
    entries = _entries("sums", {}, 1)
    next(entries)
    groups = {os.getpgid(child) for child in children() - before}
    entries.close()
    assert groups
    assert os.getpgrp() not in groups


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("signs=[+, x]", ("+", "x")),
        ("signs=+,x", ("+", "x")),
        ("scale=1", 1.0),
        ("scale=1e-1", 0.1),
        ("words=true", True),
        ("limit=null", None),
        ("limit=3", 3),
    ],
)
def test_values_are_read_as_the_tasks_types(word: str, value: Any) -> None:
    from qarl.data.reasoning_gym_tasks import make_dataset

    name, _, text = word.partition("=")
    read = getattr(make_dataset("sums", {name: text}).config, name)
    assert read == value
    assert type(read) is type(value)


def test_the_help_names_tasks_and_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "reasoning_gym" in capsys.readouterr().out
    assert main(["reasoning_gym", "--help", "tasks"]) == 0
    assert "open_sums" in capsys.readouterr().out
    assert main(["reasoning_gym", "--help", "sums"]) == 0
    told = capsys.readouterr().out
    assert "high" in told
    assert "tuple[str, ...]" in told


def test_the_common_keys_are_those_of_the_request() -> None:
    from dataclasses import fields

    from qarl.sources import COMMON
    from qarl.sources.__main__ import DataRequest

    assert tuple(field.name for field in fields(DataRequest)) == COMMON
