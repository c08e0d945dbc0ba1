"""`qarl bench against`: two git revisions run in turn; a slower phase shows as a ratio.

The runs are a stand-in that writes fixed seconds, so the ratios are exact and do not depend on the machine's load.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from qarl.bench.__main__ import main
from qarl.bench.against_revision import Arguments, compare
from qarl.errors import UserError

STAND_IN = """
import json, pathlib, sys
import qarl
keys = dict(argument.split("=", 1) for argument in sys.argv[1:])
folder = pathlib.Path(keys["output_dir"]) / keys["name"]
folder.mkdir(parents=True)
names = ("rollout", "old_log_prob", "update", "publish")
seconds = {name: {factor} if name == "update" else 1.0 for name in names}
seconds["step"] = sum(seconds.values())
steps = int(keys["trainer.total_training_steps"])
lines = [{"val/accuracy": 0.5}]
for step in range(steps):
    warm_up = 10.0 if step == 0 else 1.0
    timed = {f"timing_s/{name}": warm_up * value for name, value in seconds.items()}
    lines.append(timed | {"response_length/mean": {length}})
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
with open("order.txt", "a") as order:
    order.write(f"{pathlib.Path(qarl.__path__[0]).parent.name} {keys['config']}\\n")
{end}
"""


def write(checkout: Path, *, factor: float = 1.0, length: float = 8.0, end: str = "") -> None:
    values = {"{factor}": str(factor), "{length}": str(length), "{end}": end}
    text = STAND_IN
    for name, value in values.items():
        text = text.replace(name, value)
    (checkout / "qarl" / "train.py").write_text(text)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git repository with a commit whose `qarl.train` is the stand-in."""
    checkout = tmp_path / "checkout"
    (checkout / "qarl").mkdir(parents=True)
    (checkout / "configs").mkdir()
    (checkout / "configs" / "quickstart.yaml").write_text("name: x\n")
    (checkout / "qarl" / "__init__.py").write_text("")
    write(checkout)
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(
            ["git", "-C", str(checkout), *command],
            check=True,
            env={**os.environ, "HOME": str(tmp_path)},
        )
    return checkout


def worktrees(checkout: Path) -> int:
    listed = subprocess.run(
        ["git", "-C", str(checkout), "worktree", "list"], capture_output=True, text=True, check=True
    )
    return len(listed.stdout.splitlines())


def test_equal_revisions_take_turns(checkout: Path) -> None:
    pairs = compare(Arguments("HEAD", pairs=3, steps=3), checkout)
    times = {"rollout": 1, "old_log_probs": 1, "update": 1, "publish": 1, "step": 4, "length": 8}
    assert pairs == [{"before": times, "now": times}] * 3
    runs = [line.split() for line in (checkout / "order.txt").read_text().splitlines()]
    assert [tree for tree, _ in runs] == [
        "before",
        "checkout",
        "checkout",
        "before",
        "before",
        "checkout",
    ]
    assert {config for _, config in runs} == {str(checkout / "configs" / "quickstart.yaml")}
    assert worktrees(checkout) == 1


def test_a_slower_phase_and_longer_responses_are_seen_without_a_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qarl.bench.against_revision.CHECKOUT", checkout)
    write(checkout, factor=1.2, length=9.0)
    assert main(["against", "HEAD", "pairs=2", "steps=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "| update | 1 | 1.2 | 1.200 | 1.200-1.200 |" in lines
        and "| step | 4 | 4.2 | 1.050 | 1.050-1.050 |" in lines
    )
    assert "different lengths" in lines[-1]


def test_a_failed_run_has_no_figure_and_leaves_no_worktree(checkout: Path) -> None:
    write(checkout, end="sys.exit('the reason')")
    with pytest.raises(UserError, match="the reason"):
        compare(Arguments("HEAD", pairs=1, steps=2), checkout)
    assert worktrees(checkout) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "revision is missing"),
        (["pairs=2"], "revision is missing"),
        (["HEAD", "steps=1"], "equal to 2"),
        (["HEAD", "pair=1"], "pairs"),
        (["nowhere"], "fix: give a branch, a tag or a commit"),
        (["HEAD", "config=nowhere.yaml"], "no config 'nowhere.yaml'"),
    ],
)
def test_invalid_arguments(
    checkout: Path,
    argv: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("qarl.bench.against_revision.CHECKOUT", checkout)
    assert main(["against", *argv]) == 2 and message in capsys.readouterr().err
    assert not (checkout / "order.txt").exists()
