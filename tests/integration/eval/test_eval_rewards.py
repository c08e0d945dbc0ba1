"""What `qarl eval` gives to a reward, and what it says about ground truths, with an engine that only answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bad_runs import row, write_rows
from random_models import save_tokenizer
from smollm2 import skip_unless_installed

from qarl.config.command_arguments import read_request
from qarl.data.entry_text import to_text
from qarl.errors import UserError
from qarl.eval import evaluate
from qarl.eval.arguments import EvalRequest, settings_of

RESPONSE = [7, 1]
"""t7, and t1, which ends it."""


class Engine:
    def __init__(self, config: Any) -> None:
        self.config = config

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def publish(self, *_: Any, **__: Any) -> None: ...

    def generate(self, prompts: list[list[int]], *_: Any) -> Any:
        return SimpleNamespace(response_token_ids=[RESPONSE] * len(prompts), conversations=None)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "RolloutEngine": Engine,
        "engine_of": lambda *_: None,
        "read_tensors": lambda _: {},
    }.items():
        monkeypatch.setattr(evaluate, name, value)
    save_tokenizer(tmp_path / "model", 64)
    Path("model/config.json").write_text("{}")
    source = (
        "def ends(solution_str, ground_truth, **_):\n"
        "    return float(solution_str.split() == ground_truth.split())\n"
    )
    Path("mine.py").write_text(source)
    return Path("model")


@pytest.mark.parametrize(
    ("keep", "truth", "score"), [(False, "t7", 1), (True, "t7 t1", 1), (True, "t7", 0)]
)
def test_special_tokens(
    model: Path, capsys: pytest.CaptureFixture[str], keep: bool, truth: str, score: int
) -> None:
    write_rows("x.jsonl", [row(ground_truth=truth)])
    request = EvalRequest(model, files="x.jsonl", reward="mine.py:ends", keep_special_tokens=keep)
    assert f"| {score:.1%} " in evaluate.evaluate(request, settings_of(request))
    assert "ground truths" not in capsys.readouterr().err


def test_ground_truths_that_no_response_can_match(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows("x.jsonl", [row(ground_truth="seven")] * 3)
    request = EvalRequest(model, files="x.jsonl", reward="arithmetic")
    assert "| 0.0% " in evaluate.evaluate(request, settings_of(request))
    said = capsys.readouterr().err
    assert said.count("3 of 3 ground truths are no right answers") == 1 and "'seven'" in said


def test_a_damaged_file(model: Path) -> None:
    Path("x.jsonl").write_text("{", encoding="utf-16")
    request = EvalRequest(model, files="x.jsonl", reward="arithmetic")
    with pytest.raises(UserError, match="UTF-16"):
        evaluate.evaluate(request, settings_of(request))


def test_a_stop_that_no_response_can_have_is_named_as_it_was_given(model: Path) -> None:
    write_rows("x.jsonl", [row(ground_truth="t7")])
    request = EvalRequest(model, files="x.jsonl", reward="mine.py:ends", stop_token_ids=[999])
    with pytest.raises(UserError, match="token 999 does not exist") as caught:
        evaluate.evaluate(request, settings_of(request))
    assert caught.value.where == "stop_token_ids"


def test_a_task_of_reasoning_gym(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library's own scorer, for a right and for a wrong response."""
    skip_unless_installed("reasoning_gym")
    rows = []
    for answer in ("t7", "t8"):
        entry = {"question": "t3", "answer": answer, "metadata": {}}
        info = {"task": "caesar_cipher", "parameters": "{}", "answer_in": "auto"}
        rows.append(row(ground_truth=answer) | {"extra_info": info | {"entry": to_text(entry)}})
    write_rows("x.jsonl", rows)
    request = EvalRequest(model, files="x.jsonl", reward="reasoning_gym")
    assert "| 50.0% " in evaluate.evaluate(request, settings_of(request))
    assert "ground truths" not in capsys.readouterr().err


def test_variables_of_a_chat_template_in_an_evaluation(model: Path) -> None:
    write_rows("x.jsonl", [row(ground_truth="t7")])
    words = [str(model), "files=x.jsonl", "reward=mine.py:ends"]
    given = [*words, "apply_chat_template_kwargs={enable_thinking: false}"]
    request = read_request(EvalRequest, given, example="qarl eval M", positional="model")
    assert request.apply_chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises(UserError, match="does not use enable_thinking"):
        evaluate.evaluate(request, settings_of(request))
    with pytest.raises(UserError, match="apply_chat_template_kwargs=3"):
        read_request(
            EvalRequest,
            [*words, "apply_chat_template_kwargs=3"],
            example="qarl eval M",
            positional="model",
        )
