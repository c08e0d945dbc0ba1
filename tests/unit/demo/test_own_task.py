"""`qarl warm-start`: docs/learn/own_task.md as a reader follows it, and tasks that are wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from checkout import ROOT

from qarl.__main__ import main
from qarl.config import load_config
from qarl.data.rewards import get_reward_fn
from qarl.demo.own_task import WarmStart, load_task, warn_if_far_below
from qarl.demo.tiny_model import QUICKSTART, RECORD, Recipe, make_tokenizer
from qarl.demo.worked import worked

PAGE = (ROOT / "docs/learn/own_task.md").read_text(encoding="utf-8")
SMALL = ["steps=2", "train_size=40", "test_size=8"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a reader who saved the page's task, which is also examples/own_task.py."""
    (task,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert task in (ROOT / "examples/own_task.py").read_text(encoding="utf-8")
    (tmp_path / "sort_digits.py").write_text(task, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands() -> list[list[str]]:
    """The words after `qarl` of each command on the page."""
    return [line.split()[1:] for line in PAGE.splitlines() if line.startswith("qarl ")]


def test_the_page_from_the_task_to_a_run_that_may_start(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warm_start, train, evaluate, *others, report = commands()
    assert main([*warm_start, *SMALL]) == 0
    said = capsys.readouterr()
    assert "now: qarl train config=sort_digits.yaml" in said.out
    assert "warning: the warm start ended at 0.0% right answers" in said.err
    assert "target of 30%, after 2 steps" in said.err and "Raise steps=2, or make" in said.err
    assert all(main([*command, "dry_run=true"]) == 0 for command in (train, *others))
    config = load_config(train[1:])
    assert report[1:3] == [str(load_config(command[1:]).run_dir) for command in others]
    assert evaluate[1] == str(config.run_dir) and evaluate[2] == "against=bf16"
    assert config.trainer.save_freq == config.trainer.total_training_steps, (
        "or there is no BF16 to compare with"
    )
    problem, answer = "9081726354", "0123456789"
    reward = get_reward_fn(config.reward.function)
    assert [reward("", text, answer) for text in (answer, problem, "")] == [
        1.0,
        pytest.approx(0.1),
        0.0,
    ]
    assert len(f"sort {problem}") + 2 <= config.data.max_prompt_length
    assert len(answer) + 1 <= config.data.max_response_length


@pytest.mark.parametrize(("accuracy", "warned"), [(0.14, True), (0.15, False), (0.4, False)])
def test_a_warm_start_far_below_its_target(
    accuracy: float, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RECORD).write_text(json.dumps({"greedy_accuracy": accuracy, "steps": 600}))
    warn_if_far_below(Recipe(QUICKSTART, tmp_path, tmp_path, steps=600, target=0.3))
    assert ("far below its target" in capsys.readouterr().err) == warned


def test_a_file_whose_name_cannot_name_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "sort_digits.py").rename(folder / "sort digits.py")
    assert main(["warm-start", "sort digits.py", *SMALL]) == 2
    assert "rename the file" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["sort digits.py"]


def test_an_answer_that_is_a_number(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = folder / "sort_digits.py"
    task.write_text(task.read_text() + "\n\ndef answer(problem):\n    return 7\n")
    assert main(["warm-start", "sort_digits.py", *SMALL]) == 2
    assert "let prompt and answer return text" in capsys.readouterr().err


def test_a_second_call_makes_nothing_and_leaves_the_config(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, weights = (
        ["warm-start", "sort_digits.py", *SMALL],
        folder / "models/tiny-sort_digits/model.safetensors",
    )
    assert main(command) == 0
    inode = weights.stat().st_ino
    values = yaml.safe_load((folder / "sort_digits.yaml").read_text()) | {"seed": 5}
    (folder / "sort_digits.yaml").write_text(yaml.safe_dump(values))
    capsys.readouterr()
    assert main(command) == 0
    assert "up to date" in capsys.readouterr().out and weights.stat().st_ino == inode
    with (folder / "sort_digits.py").open("a") as file:
        file.write("# another\n")
    assert main([*command, "overwrite=true"]) == 0 and weights.stat().st_ino != inode
    assert yaml.safe_load((folder / "sort_digits.yaml").read_text())["seed"] == 5


def test_a_model_and_data_of_other_arguments_are_replaced_only_if_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["warm-start", "sort_digits.py", *SMALL]
    assert main(command) == 0
    before = contents(folder)
    changes = {
        ("seed=1",): "seed: 0 -> 1",
        ("steps=3", "train_size=40", "test_size=9"): "test_size: 8 -> 9; steps: 2 -> 3",
        ("experts=2",): "experts: 0 -> 2",
    }
    for overrides, why in changes.items():
        capsys.readouterr()
        given = {word.partition("=")[0] for word in overrides}
        unchanged = [word for word in command if word.partition("=")[0] not in given]
        assert main([*unchanged, *overrides]) == 2
        error = capsys.readouterr().err
        assert "will not replace models/tiny-sort_digits" in error and f"why: {why}\n" in error
        assert "overwrite=true" in error and contents(folder) == before
    with (folder / "sort_digits.py").open("a") as file:
        file.write("# another\n")
    assert main(command) == 2 and "why: its file is another" in capsys.readouterr().err
    record = folder / "models/tiny-sort_digits" / RECORD
    record.write_text("[")
    assert main(command) == 2 and "it is damaged" in capsys.readouterr().err
    (folder / "data/sort_digits/test.parquet").unlink()
    assert main([*command, "overwrite=true"]) == 0
    assert (folder / "data/sort_digits/test.parquet").is_file()
    assert json.loads(record.read_text())["settings"]["seed"] == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


WRONG = {
    "def answer": ("def reply", "the task has no function answer"),
    'return "".join(rng.choices': ("return list(rng.choices", "fails on its first problem"),
    "right = sum": (
        "int(solution_str)\n    right = sum",
        "also score an empty or a garbled response",
    ),
    "right / max(": ("0 * right / max(", "the task's own answer earns nothing"),
    "k=10": ("k=1", "too few different problems"),
}


@pytest.mark.parametrize("old", WRONG)
def test_a_wrong_task_is_refused(
    old: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, message = WRONG[old]
    file = folder / "sort_digits.py"
    file.write_text(file.read_text().replace(old, new))
    assert main(["warm-start", "sort_digits.py", *SMALL]) == 2
    assert message in capsys.readouterr().err


def test_wrong_arguments_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in {
        ("sort_digits.py", "tagret=1"): "did you mean target=...?",
        ("sort_digits.py", "target=2"): "less than or equal to 1",
        ("data",): "data is a folder",
        ("sort_digits.txt",): "sort_digits.txt is no Python file",
        ("sort_digits.py", "steps"): "write steps=VALUE",
        ("nothing.py",): "cannot load nothing.py",
        (): "file is missing",
    }.items():
        (folder / "data").mkdir(exist_ok=True)
        assert main(["warm-start", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_task_of_several_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/guessing_game.py: the worked game halves what is left, and the config holds conversations."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "guessing_game.py"
    file.write_text((ROOT / "examples/guessing_game.py").read_text(encoding="utf-8"))
    assert main(["warm-start", "guessing_game.py", *SMALL]) == 0
    config = load_config(["config=guessing_game.yaml"])
    assert config.rollout.environment == "guessing_game.py:environment"
    assert config.reward.function == "environment"
    assert config.multi_turn.max_assistant_turns == 11
    task = load_task(WarmStart(file))
    game = ("000000", 126)
    assert task.turns(game) == ["250", "125", "187", "156", "140", "132", "128", "126"]
    (conversation,) = worked(make_tokenizer(), task, [game])
    said = [m["content"] for m in conversation.messages[2::2]]
    assert said == ["lower", "higher", *["lower"] * 5]
    assert conversation.rewards == [pytest.approx(1 - 7 / 12)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return None", "earns nothing"),
        ("return 7", "int is no message"),
        ("return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_an_environment_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, words: str
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "def draw(rng): return rng.random()\ndef prompt(problem): return 'x'\n"
        f"def answer(problem): return ['y']\ndef environment(messages, **_): {body}\n"
    )
    assert main(["warm-start", str(file), *SMALL]) == 2
    assert words in capsys.readouterr().err
