"""The frame of a chat template, against the template's rendering of the whole conversation.

Of templates that render a turn alike whatever follows it, the ids of prompt, turns and frames are those of the whole
conversation. The others here rewrite earlier turns, which must not reach the frame.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from chat_tokenizers import save_chat_tokenizer

from qarl.demo.tiny_model import make_tokenizer
from qarl.errors import UserError
from qarl.turns.frame import ChatFrame

QUESTION = {"role": "user", "content": "17 * 3?"}
ANSWER = {"role": "user", "content": " 51 "}
TOOLS = [{"role": "tool", "content": "51", "name": "calc"}, {"role": "tool", "content": "[tool]\n"}]
HEAD = "{% for m in messages %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = HEAD + "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n" + TAIL
THINKING = (
    "{% set last = namespace(at=-1) %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 > last.at %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'].split('</think>')[-1] }}<|im_end|>\n" + TAIL
)
"""As Qwen3's: only turns after the last question of the user have thoughts."""
ONE_BLOCK = (
    HEAD
    + "{% if m['role'] == 'tool' %}{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}"
    "<|im_start|>user{% endif %}\n<tool_response>\n{{ m['content'] }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}" + TAIL
)
"""As Qwen's: the answers of one turn's tools share a block."""
CALLED = (
    HEAD + "{% if m['role'] == 'tool' and not messages[loop.index0 - 1].get('tool_calls') "
    "and messages[loop.index0 - 1]['role'] != 'tool' %}{{ raise_exception('no call to answer') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.get('tool_calls', []) %}<call>{{ call['function']['name'] }} {{ call['id'] }}</call>{% endfor %}"
    "<|im_end|>\n" + TAIL
)
"""As Mistral's: the answer of a tool needs a call before it."""
ALTERNATING = (
    HEAD
    + "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% if m['role'] == 'user' %}<|im_start|>[INST] {{ m['content'] | trim }} [/INST]"
    "{% else %} {{ m['content'] }} <|im_end|>{% endif %}{% endfor %}"
)
"""As Llama 2's: a user and the model in turn, contents trimmed, a blank before the end of a turn."""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path))


def ids(tokenizer: Any, template: str, messages: list[dict[str, str]], **options: Any) -> list[int]:
    tokenizer.chat_template = template
    rendered: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **options
    )
    return list(rendered)


@pytest.mark.parametrize("template", [CHATML, ONE_BLOCK], ids=["chatml", "one block"])
@pytest.mark.parametrize(
    "replies", [[ANSWER], TOOLS, [*TOOLS, ANSWER]], ids=["user", "tools", "both"]
)
def test_the_ids_of_a_conversation_are_those_of_its_rendering(
    tokenizer: Any, template: str, replies: list[dict[str, str]]
) -> None:
    text = "calc 17*3"
    prompt = ids(tokenizer, template, [QUESTION])
    turn = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    frame = ChatFrame(tokenizer, [tokenizer.eos_token_id]).token_ids(replies, after=turn[-1])
    whole = ids(tokenizer, template, [QUESTION, {"role": "assistant", "content": text}, *replies])
    assert prompt + turn + frame == whole


def test_of_the_tiny_model() -> None:
    tokenizer = make_tokenizer()
    frame = ChatFrame(tokenizer, [tokenizer.eos_token_id])
    shown = tokenizer.decode(frame.token_ids([ANSWER], after=tokenizer.eos_token_id))
    assert shown == "<|user|> 51 <|assistant|>"
    cut = frame.token_ids([ANSWER], after=tokenizer.convert_tokens_to_ids("7"))
    assert tokenizer.decode(cut) == "<|eos|><|user|> 51 <|assistant|>"


def test_a_turn_that_was_cut_is_ended_by_the_frame(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    end = tokenizer.eos_token_id
    frame = ChatFrame(tokenizer, [end])
    cut = frame.token_ids([ANSWER], after=end + 1)
    assert cut == [end, *frame.token_ids([ANSWER], after=end)]
    assert (
        tokenizer.decode(cut)
        == "<|im_end|>\n<|im_start|>user\n 51 <|im_end|>\n<|im_start|>assistant\n"
    )


def test_another_stop_token_ends_a_turn_as_well(tokenizer: Any) -> None:
    """The model may stop at <|endoftext|>. It keeps this id, and no second end is put behind it."""
    tokenizer.chat_template = CHATML
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    end = tokenizer.eos_token_id
    frame = ChatFrame(tokenizer, [end, other])
    assert frame.token_ids([ANSWER], after=other) == frame.token_ids([ANSWER], after=end)


def test_a_stop_that_is_no_end_of_a_turn_is_followed_by_one(tokenizer: Any) -> None:
    """`rollout.stop_token_ids` may have the id of a tag, or the very token with which the template ends a turn."""
    tokenizer.chat_template = CHATML
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    end = tokenizer.eos_token_id
    plain = ChatFrame(tokenizer, [end])
    tag = ChatFrame(tokenizer, [end], also=[other])
    assert tag.token_ids([ANSWER], after=other) == [end, *plain.token_ids([ANSWER], after=end)]
    same = ChatFrame(tokenizer, [other], also=[end])
    assert same.token_ids([ANSWER], after=end) == plain.token_ids([ANSWER], after=end)


def test_thoughts_that_the_template_removes_later_do_not_reach_the_frame(tokenizer: Any) -> None:
    """The difference of two renderings would be wrong: the first is no prefix of the second."""
    tokenizer.chat_template = THINKING
    turns = [QUESTION, {"role": "assistant", "content": "hm"}]
    before = tokenizer.apply_chat_template(turns, tokenize=False)
    after = tokenizer.apply_chat_template([*turns, ANSWER], tokenize=False)
    assert not after.startswith(before)
    frame = ChatFrame(tokenizer, [tokenizer.eos_token_id])
    shown = tokenizer.decode(frame.token_ids([ANSWER], after=tokenizer.eos_token_id))
    assert shown == "\n<|im_start|>user\n 51 <|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_wants_a_call_before_an_answer(tokenizer: Any) -> None:
    tokenizer.chat_template = CALLED
    frame = ChatFrame(tokenizer, [tokenizer.eos_token_id])
    shown = tokenizer.decode(frame.token_ids(TOOLS[:1], after=tokenizer.eos_token_id))
    assert shown == "\n<|im_start|>tool\n51<|im_end|>\n<|im_start|>assistant\n"
    cut = frame.token_ids(TOOLS[:1], after=5)
    assert cut[0] == tokenizer.eos_token_id


def test_a_template_in_which_roles_alternate(tokenizer: Any) -> None:
    """The end of a turn has a blank before its token, which the model's own end replaces."""
    tokenizer.chat_template = ALTERNATING
    frame = ChatFrame(tokenizer, [tokenizer.eos_token_id])
    shown = tokenizer.decode(frame.token_ids([ANSWER], after=tokenizer.eos_token_id))
    assert shown == "<|im_start|>[INST] 51 [/INST]"
    cut = tokenizer.decode(frame.token_ids([ANSWER], after=5))
    assert cut == " <|im_end|><|im_start|>[INST] 51 [/INST]"
    with pytest.raises(
        UserError, match=r"(?s)roles: user, user.*roles must alternate.*such as user"
    ):
        frame.token_ids([ANSWER, ANSWER], after=5)
    with pytest.raises(UserError, match="roles: tool"):
        frame.token_ids(TOOLS[:1], after=5)


def test_a_template_that_hides_turns_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        HEAD + "{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}" + TAIL
    )
    with pytest.raises(UserError, match="does not render the text of an assistant's message"):
        ChatFrame(tokenizer, [tokenizer.eos_token_id]).token_ids([ANSWER], after=5)


def test_a_template_without_an_end_of_turn(tokenizer: Any) -> None:
    tokenizer.chat_template = HEAD + "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    frame = ChatFrame(tokenizer, [tokenizer.eos_token_id])
    both = [frame.token_ids([ANSWER], after=after) for after in (5, tokenizer.eos_token_id)]
    assert [tokenizer.decode(each) for each in both] == ["\nuser:  51 \n"] * 2
