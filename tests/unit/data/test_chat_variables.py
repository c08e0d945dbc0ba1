"""Variables of a chat template: they reach the prompts, and those that would do nothing are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from chat_tokenizers import save_chat_tokenizer

from qarl.data.dated_template import undated_digest, written_dates
from qarl.data.prompts import load_prompts
from qarl.errors import UserError
from qarl.turns.frame import ChatFrame

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{# depth is only a word of this comment #}"
)
ROW = '{"data_source": "x", "prompt": [{"role": "user", "content": "3?"}], "reward_model": {"ground_truth": "3"}}\n'


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path / "chat"))
    tokenizer.chat_template = THINKING
    return tokenizer


def load(path: Path, tokenizer: Any, variables: dict[str, Any]) -> str:
    """The text of the prompt of `ROW`."""
    file = path / "rows.jsonl"
    file.write_text(ROW)
    (prompt,) = load_prompts(
        str(file), tokenizer=tokenizer, max_prompt_length=99, apply_chat_template_kwargs=variables
    )
    return str(tokenizer.decode(prompt.prompt_token_ids))


def test_prompts_without_thinking(tmp_path: Path, tokenizer: Any) -> None:
    usual = "<|im_start|>user\n3?<|im_end|>\n<|im_start|>assistant\n"
    assert load(tmp_path, tokenizer, {}) == usual
    assert load(tmp_path, tokenizer, {"enable_thinking": True}) == usual
    silent = load(tmp_path, tokenizer, {"enable_thinking": False})
    assert silent == usual + "<think>\n\n</think>\n\n"


def test_the_frame_between_turns_has_them_too(tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    message = {"role": "user", "content": "4?"}
    texts = [
        tokenizer.decode(ChatFrame(tokenizer, [end], variables).token_ids([message], after=end))
        for variables in (None, {"enable_thinking": False})
    ]
    assert texts[0] == "\n<|im_start|>user\n4?<|im_end|>\n<|im_start|>assistant\n"
    assert texts[1] == texts[0] + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name", ["enable_thought", "depth"])
def test_a_variable_that_the_template_does_not_have(
    tmp_path: Path, tokenizer: Any, name: str
) -> None:
    with pytest.raises(UserError) as error:
        load(tmp_path, tokenizer, {name: False})
    assert error.value.what == f"the chat template does not use {name}"
    assert "it names" in str(error.value.fix)
    assert "enable_thinking" in str(error.value.fix)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools", "tokenize"])
def test_what_is_set_elsewhere(tmp_path: Path, tokenizer: Any, name: str) -> None:
    with pytest.raises(UserError, match=f"{name} cannot be set"):
        load(tmp_path, tokenizer, {name: True})


def test_a_text_that_is_also_a_word_for_false(tmp_path: Path, tokenizer: Any) -> None:
    """`no` is the code of Norwegian."""
    tokenizer.chat_template += "{{ language }}"
    assert load(tmp_path, tokenizer, {"language": "no"}).endswith("assistant\nno")


def test_dates_that_a_variable_switches_on(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% if dated is defined and dated %}{{ strftime_now('%Y') }}{% endif %}" + THINKING
    )
    chat = [{"role": "user", "content": "3?"}]
    assert written_dates(tokenizer, [chat], {}) == {}
    assert list(written_dates(tokenizer, [chat], {"dated": True})) == ["%Y"]
    file = tmp_path / "rows.jsonl"
    file.write_text(ROW)
    prompts = load_prompts(str(file), tokenizer=tokenizer, max_prompt_length=99)
    digests = {undated_digest(tokenizer, prompts, {"dated": dated}) for dated in (True, False)}
    assert len(digests) == 2
