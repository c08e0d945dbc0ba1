"""The traps of real tokenizers, with a small one that has them all, and with SmolLM2's where it is installed.

The ids of a prompt are the text of the chat template, to the letter, and what a response's ids are, stays what the
engine has sampled: nothing turns them into text and back.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizers import MISSING_BYTE, save_chat_tokenizer
from smollm2 import save_smollm2_tokenizer
from transformers import AutoTokenizer

from qarl.checks.suspect_prompts import lost_text
from qarl.data.prompts import Prompt, load_prompts
from qarl.data.response_text import response_texts
from qarl.errors import UserError
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.batch import make_batch

TEXTS = (
    "What is 3 + 4?",
    "  two spaces first, and last  ",
    "\n\n12 on a line of its own",
    "a  12b and don't",
    "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600",
    "e\u0301 is not \u00e9",
    "\u2581 is a piece of other vocabularies",
)
SAVE = {"small": save_chat_tokenizer, "smollm2": save_smollm2_tokenizer}


@pytest.fixture(scope="module", params=SAVE)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = SAVE[request.param](tmp_path_factory.mktemp(request.param))
    return AutoTokenizer.from_pretrained(folder)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def load(path: Path, tokenizer: Any, *rows: list[dict[str, str]], limit: int = 999) -> list[Prompt]:
    """The prompts of a file with these messages. `limit`: most tokens."""
    rest = {"data_source": "x", "reward_model": {"style": "rule", "ground_truth": "1"}}
    lines = [json.dumps({"prompt": messages, **rest}) for messages in rows]
    file = path / "prompts.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return list(load_prompts(str(file), tokenizer=tokenizer, max_prompt_length=limit))


def framed(system: str, text: str) -> str:
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_prompt_is_the_template_s_text_to_the_letter(tmp_path: Path, tokenizer: Any) -> None:
    """Spaces, line ends, digits and composed characters included."""
    prompts = load(tmp_path, tokenizer, *map(user, TEXTS))
    default = tokenizer.decode(prompts[0].prompt_token_ids).split("<|im_end|>")[0]
    system = default.removeprefix("<|im_start|>system\n")
    assert "helpful" in system, "the template inserts a system message of its own"
    for prompt, text in zip(prompts, TEXTS, strict=True):
        assert tokenizer.decode(prompt.prompt_token_ids) == framed(system, text)


def test_a_system_message_of_the_row_replaces_the_template_s(
    tmp_path: Path, tokenizer: Any
) -> None:
    system = {"role": "system", "content": "Answer with a number."}
    (prompt,) = load(tmp_path, tokenizer, [system, *user("3 + 4")])
    assert tokenizer.decode(prompt.prompt_token_ids) == framed("Answer with a number.", "3 + 4")


def test_an_empty_system_message_is_one(tmp_path: Path, tokenizer: Any) -> None:
    (prompt,) = load(tmp_path, tokenizer, [{"role": "system", "content": ""}, *user("3 + 4")])
    assert tokenizer.decode(prompt.prompt_token_ids) == framed("", "3 + 4")


def test_the_limit_counts_every_token_of_the_template(tmp_path: Path, tokenizer: Any) -> None:
    (prompt,) = load(tmp_path, tokenizer, user(TEXTS[4]))
    length = len(prompt.prompt_token_ids)
    (again,) = load(tmp_path, tokenizer, user(TEXTS[4]), limit=length)
    assert again.prompt_token_ids == prompt.prompt_token_ids
    with pytest.raises(UserError, match=f"set data.max_prompt_length={length}"):
        load(tmp_path, tokenizer, user(TEXTS[4]), limit=length - 1)


def test_white_space_before_a_digit_is_one_token(tokenizer: Any) -> None:
    """SmolLM2's rule of cutting takes digits apart first. GPT-2's, which transformers gives a GGUF file, splits it."""
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12").input_ids) == ["ĊĊ", "1", "2"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  1").input_ids) == ["a", "ĠĠ", "1"]


def test_an_export_gives_the_same_ids(tmp_path: Path, tokenizer: Any) -> None:
    """`qarl eval` reads the tokenizer from an export, which has saved it again."""
    tokenizer.save_pretrained(tmp_path / "export")
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    rows = list(map(user, TEXTS))
    first = load(tmp_path, tokenizer, *rows)
    second = load(tmp_path, again, *rows)
    assert [p.prompt_token_ids for p in first] == [p.prompt_token_ids for p in second]
    assert (again.eos_token_id, again.pad_token_id) == (2, 2)


def test_the_end_token_counts_although_it_also_pads(tokenizer: Any) -> None:
    """A mask that was computed from the pad token would leave the end out, and no response would learn to end."""
    end = tokenizer.eos_token_id
    assert tokenizer.pad_token_id == end
    responses = [[*tokenizer("7").input_ids, end], tokenizer("it is 12").input_ids]
    log_probs = [[-0.5] * len(response) for response in responses]
    rollout = RolloutBatch([[1], [1]], responses, log_probs, ["stop", "length"], weight_version=0)
    numbers = torch.tensor([1.0, 0.0])
    batch = make_batch(rollout, numbers, numbers, pad_token_id=end)
    assert batch.response_mask.sum(1).tolist() == [len(response) for response in responses]
    assert [
        row[mask].tolist() for row, mask in zip(batch.responses, batch.response_mask, strict=True)
    ] == responses


def test_ids_that_text_does_not_give_back_stay(tokenizer: Any) -> None:
    """A model may spell a word in other pieces than the tokenizer does."""
    spelled = [tokenizer.convert_tokens_to_ids(piece) for piece in ("d", "o", "n", "'", "t")]
    (text,) = response_texts(tokenizer, [spelled], keep_special_tokens=False)
    assert text == "don't" and tokenizer(text).input_ids != spelled
    rollout = RolloutBatch([[1]], [spelled], [[-0.5] * 5], ["length"], weight_version=0)
    one = torch.ones(1)
    assert make_batch(rollout, one, one, pad_token_id=2).responses.tolist() == [spelled]


def test_a_character_that_is_cut_at_the_limit(tokenizer: Any) -> None:
    """A reward gets a replacement character, and the ids are unchanged."""
    ids = tokenizer("7 \U0001f600").input_ids
    (text,) = response_texts(tokenizer, [ids[:-1]], keep_special_tokens=False)
    assert text.startswith("7 ") and text.endswith("\N{REPLACEMENT CHARACTER}")


def test_a_response_without_its_special_tokens(tokenizer: Any) -> None:
    """Also those in its middle, and leading spaces are no part of them."""
    ids = [*tokenizer(" x").input_ids, 0, *tokenizer("y").input_ids, 2]
    assert response_texts(tokenizer, [ids], keep_special_tokens=False) == [" xy"]
    assert response_texts(tokenizer, [ids], keep_special_tokens=True) == [
        " x<|endoftext|>y<|im_end|>"
    ]


def test_text_that_the_vocabulary_cannot_write_is_a_warning(tmp_path: Path, tokenizer: Any) -> None:
    rows = [user("3 + 4"), user(f"3{MISSING_BYTE}4"), user("what is <|endoftext|>?")]
    prompts: Any = load(tmp_path, tokenizer, *rows)
    assert tokenizer.unk_token_id in prompts[1].prompt_token_ids
    (finding,) = lost_text(tokenizer, prompts)
    assert "cannot write 1 of 3 training prompts, the first in row 1" in str(finding)
    assert list(lost_text(tokenizer, prompts[:1])) == []


def test_a_template_that_writes_the_unknown_token_by_another_name(
    tmp_path: Path, tokenizer: Any
) -> None:
    """In GPT-2's vocabulary one token is begin, end and unknown, and templates call it by the names of its roles."""
    other = copy.deepcopy(tokenizer)
    other.eos_token = other.unk_token
    other.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    prompts: Any = load(tmp_path, other, user("3 + 4"))
    assert other.unk_token_id in prompts[0].prompt_token_ids
    assert list(lost_text(other, prompts)) == []
