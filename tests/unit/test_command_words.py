"""Arguments that are written as other programs want them: one error, with the arguments as they should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from qarl.__main__ import COMMANDS, main
from qarl.command_line import check_words
from qarl.errors import UserError

WRITTEN = {
    ("config", "=", "q.yaml"): "config=q.yaml",
    ("config=", "q.yaml"): "config=q.yaml",
    ("config", "=q.yaml"): "config=q.yaml",
    ("--config", "q.yaml"): "config=q.yaml",
    ("--config=q.yaml", "--rollout.n", "4"): "config=q.yaml rollout.n=4",
    ("a", "--n-gpus", "2", "--seed", "-1"): "a n_gpus=2 seed=-1",
    ("a", "--quickstart"): "a quickstart",
    ("-c", "q.yaml"): "KEY=VALUE",
}


@pytest.mark.parametrize("words", WRITTEN, ids=" ".join)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_the_arguments_as_they_should_be(
    command: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *words]) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and said.count("fix:") == 1
    corrected = WRITTEN[words] if words[0] == "-c" else f"{command} {WRITTEN[words]}"
    assert f"fix: write {corrected}" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_takes_a_key_twice(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "config=q.yaml", "seed=1", "seed=2"]) == 2
    assert "error: seed is given twice: 1, then 2\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["config=q.yaml", "quant.ignore=[lm_head, 're:=']", "name="],
        ["runs/a=b", "runs/a=c", "trainer.test_freq=-1"],
        ["run=", "output=o"],
        ["=3"],
        [""],
    ],
)
def test_what_is_not_questioned_here(words: list[str]) -> None:
    check_words(words)


def test_each_word_of_a_message_is_quoted_for_a_shell() -> None:
    with pytest.raises(UserError, match=r"write 'name=a b'$"):
        check_words(["name", "=", "a b"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "meo", "seed=1"], "there is no demo 'meo'"),
        (["demo", "quickstart", "moe"], "only one demo can run at a time"),
        (["demo", "config=q.yaml"], "write qarl train config=q.yaml"),
        (["demo", "examples", "seed=1"], "examples has no keys"),
        (["doctor", "config=q.yaml", "device=h100"], "write doctor.device=h100"),
        (["eval", "a", "b"], "unexpected argument 'b'"),
        (["export", "a", "output=x"], "unexpected argument 'a'"),
        (["eval", "a", "n"], "write n=VALUE"),
        (["eval", "nowhere"], "there is no such folder"),
        (["eval", "a", "output=."], "it is a folder, but names the file to write"),
        (["eval", "a", "output=q.yaml/o"], "q.yaml is no folder in which files can be written"),
        (["report", "run=a"], "there is no key run"),
        (["report", "a", "together="], "together has no value"),
        (["diagnose", "calibrate", "config=q.yaml", "batches"], "write batches=VALUE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_argument_that_a_command_does_not_take(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("q.yaml").touch()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("error:") == 1
