"""A warning if a reward waits for special tokens, which are removed from the text that it gets."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qarl.checks.special_tokens import special_tokens, special_tokens_unseen
from qarl.config.reward import RewardConfig
from qarl.data.response_text import response_texts

MESSAGES = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
ENDS = "{% if add_generation_prompt %}<|im_start|>{% endif %}"
ANSWERS = "{# the answer stands in <answer> and </answer> #}"
READS_TAGS = (
    "def score(solution_str, **_):\n    return float('<answer>7</answer>' in solution_str)\n"
)
READS_NUMBERS = "def score(solution_str, **_):\n    return float(solution_str.endswith('7'))\n"


def tokenizer(tags_are_special: bool, template: str) -> Any:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "7": 1, "8": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", chat_template=template
    )
    marks = [
        AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<start_of_turn>")
    ]
    made.add_tokens(marks, special_tokens=True)
    tags = [AddedToken(text, special=tags_are_special) for text in ("<answer>", "</answer>")]
    made.add_tokens(tags, special_tokens=tags_are_special)
    made.eos_token = "<|im_end|>"
    return made


def warnings(folder: Path, source: str | None, kept: bool, **kinds: Any) -> list[str]:
    (folder / "mine.py").write_text(source or "")
    function = source or "arithmetic"
    if function.startswith("def "):
        function = f"{folder}/mine.py:score"
    made = tokenizer(**kinds)
    config: Any = SimpleNamespace(reward=RewardConfig(function=function, keep_special_tokens=kept))
    chat: Any = made.apply_chat_template(
        [{"role": "user", "content": "8"}], add_generation_prompt=True, return_dict=False
    )
    prompts: Any = [SimpleNamespace(prompt_token_ids=list(chat))]
    findings = list(special_tokens_unseen(config, made, prompts))
    assert all(finding.status == "warning" and finding.fix for finding in findings)
    return [finding.what for finding in findings]


@pytest.mark.parametrize(
    ("source", "kept", "special", "template", "words"),
    [
        (
            READS_TAGS,
            False,
            True,
            MESSAGES + ENDS,
            "source of reward.function names </answer>, <answer>",
        ),
        (
            READS_TAGS,
            False,
            True,
            MESSAGES + ANSWERS,
            "source of reward.function names </answer>, <answer>",
        ),
        (
            READS_NUMBERS,
            False,
            True,
            MESSAGES + ENDS + ANSWERS,
            "chat template names </answer>, <answer>",
        ),
        (READS_NUMBERS, False, True, MESSAGES + ENDS, None),
        (
            READS_NUMBERS + "# ends in <|im_end|>\n",
            False,
            False,
            MESSAGES,
            "source of reward.function names <|im_end|>",
        ),
        (READS_TAGS, False, False, MESSAGES + ANSWERS, None),
        (READS_TAGS, True, True, MESSAGES + ANSWERS, None),
        (None, False, True, MESSAGES + ENDS + ANSWERS, None),
        (
            "reasoning_gym",
            False,
            True,
            MESSAGES,
            "source of reward.function names </answer>, <answer>",
        ),
        ("reasoning_gym", False, False, MESSAGES + ANSWERS, None),
        (READS_NUMBERS, False, True, MESSAGES + "<start_of_turn>", None),
    ],
)
def test_tokens_that_a_reward_waits_for(
    tmp_path: Path, source: str | None, kept: bool, special: bool, template: str, words: str | None
) -> None:
    said = warnings(tmp_path, source, kept, tags_are_special=special, template=template)
    assert len(said) == (words is not None) and all(words in text for text in said), said


def test_the_warning_names_the_list_of_functions(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(READS_TAGS)
    functions: Any = [{"function": "arithmetic"}, {"function": f"{tmp_path}/mine.py:score"}]
    config: Any = SimpleNamespace(reward=RewardConfig(functions=functions))
    made = tokenizer(True, MESSAGES)
    (finding,) = special_tokens_unseen(config, made, [SimpleNamespace(prompt_token_ids=[1])])  # type: ignore[arg-type]  # no whole prompt
    assert finding.what.startswith("the source of reward.functions names </answer>")
    assert finding.where == f"reward.functions=arithmetic, {tmp_path}/mine.py:score"


@pytest.mark.parametrize("special", [True, False])
def test_the_text_that_a_reward_gets(special: bool) -> None:
    made = tokenizer(special, MESSAGES)
    ids = made.convert_tokens_to_ids(["<answer>", "7", "</answer>", "<|im_end|>"])
    kept, plain = (
        response_texts(made, [ids], keep_special_tokens=keep)[0].split() for keep in (True, False)
    )
    assert "".join(kept) == "<answer>7</answer><|im_end|>"
    assert "".join(plain) == ("7" if special else "<answer>7</answer>")
    removed = {"<|im_start|>", "<|im_end|>", "<start_of_turn>", "[UNK]"} | (
        {"<answer>", "</answer>"} if special else set()
    )
    assert set(special_tokens(made)) == removed
