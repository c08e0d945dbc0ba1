"""A damaged or odd file is read, or refused with what is wrong, where, why and what to do."""

import os
from pathlib import Path

import pytest
from damaged_files import DAMAGED, ROWS
from transformers import PreTrainedTokenizerFast

from qarl.data.prompts import load_prompts
from qarl.errors import UserError


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_is_read_or_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    file, write, words = DAMAGED[name]
    write(tmp_path / file)
    path = str(tmp_path / file)
    if words is None:
        prompts = load_prompts(path, tokenizer=tokenizer, max_prompt_length=64)
        assert [prompt.ground_truth for prompt in prompts] == [
            item["reward_model"]["ground_truth"] for item in ROWS
        ]
        return
    with pytest.raises(UserError) as refusal:
        load_prompts(path, tokenizer=tokenizer, max_prompt_length=64)
    text = str(refusal.value)
    assert all(any(either in text for either in word.split("|")) for word in words), text
    assert file in text and refusal.value.fix
    assert len(text) < 1500


def test_a_folder_that_may_not_be_entered(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch
) -> None:
    def denied(self: Path, *_: object, **__: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(UserError, match=r"(?s)cannot read.*Permission denied.*rights"):
        load_prompts(str(tmp_path / "x.jsonl"), tokenizer=tokenizer, max_prompt_length=64)


def test_no_chat_template(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    _, write, _ = DAMAGED["plain"]
    write(tmp_path / "x.jsonl")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template") as refusal:
        load_prompts(str(tmp_path / "x.jsonl"), tokenizer=tokenizer, max_prompt_length=64)
    assert "messages" not in str(refusal.value.fix) and "chat_template.jinja" in str(
        refusal.value.fix
    )


def test_no_prompt_is_left(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    _, write, _ = DAMAGED["plain"]
    write(tmp_path / "x.jsonl")
    options = {"tokenizer": tokenizer, "max_prompt_length": 1, "filter_overlong_prompts": True}
    with pytest.raises(
        UserError, match=r"(?s)no prompt is left.*leaves out all 2.*max_prompt_length=5"
    ) as refusal:
        load_prompts(str(tmp_path / "x.jsonl"), **options)
    assert "filter_overlong_prompts" not in str(refusal.value.fix)
