"""verl turns the messages of a row into the ids that the local backend and `qarl eval` have, with real tokenizers, too.

verl's own code does it, without Ray: its loading of a tokenizer, and the builder of its agent loop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import save_chat_tokenizer
from smollm2 import save_smollm2_tokenizer
from transformers import AutoTokenizer
from verl_runs import quickstart

from qarl.data.prompts import load_prompts

pytest.importorskip("verl")

from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils import hf_tokenizer
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from qarl.verl.dataset import Rows
from qarl.verl.response_ends import end_tokens, finish_reasons
from qarl.verl.run import verl_config

CONTENTS = (
    "What is 3 + 4?",
    "  two spaces first, and last  ",
    "\n\n12 on a line of its own\n",
    "na\u00efve \u4f60\u597d \U0001f600 e\u0301",
    "\x04 is a byte that the vocabulary lacks",
)
MESSAGES = [
    *([{"role": "user", "content": text}] for text in CONTENTS),
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "3 + 4"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "3 + 4"}],
]
SAVE = {"small": save_chat_tokenizer, "smollm2": save_smollm2_tokenizer}


@pytest.fixture(scope="module", params=SAVE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SAVE[request.param](tmp_path_factory.mktemp(request.param))


def test_verl_and_the_local_backend_give_the_same_ids(folder: Path, tmp_path: Path) -> None:
    rest = {"data_source": "x", "reward_model": {"style": "rule", "ground_truth": "1"}}
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt, **rest}) for prompt in MESSAGES))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    local = load_prompts(str(file), tokenizer=tokenizer, max_prompt_length=99)
    builder = create_continuous_token_builder(hf_tokenizer(str(folder)), hf_model_type="llama")
    rows = Rows.read([str(file)])
    theirs = [builder.build_initial_tokens(rows[i]["prompt"]) for i in range(len(rows))]
    assert [prompt.prompt_token_ids for prompt in local] == theirs


def test_variables_of_the_template_give_the_same_ids(tmp_path: Path) -> None:
    """By the config that a run composes: verl's dataset filters, and its agent loop samples from, these ids."""
    folder = save_chat_tokenizer(tmp_path / "small")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    silence = (
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}"
    )
    tokenizer.chat_template += silence
    tokenizer.save_pretrained(folder)
    rest = {"data_source": "x", "reward_model": {"style": "rule", "ground_truth": "1"}}
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt, **rest}) for prompt in MESSAGES))
    variables = {"enable_thinking": False}
    changes = {"data.apply_chat_template_kwargs": variables, "data.filter_overlong_prompts": True}
    config = verl_config(quickstart(**changes), on_cpu=True)
    theirs = hf_tokenizer(str(folder))
    local = load_prompts(
        str(file), tokenizer=tokenizer, max_prompt_length=199, apply_chat_template_kwargs=variables
    )
    builder = create_continuous_token_builder(
        theirs,
        hf_model_type="llama",
        chat_template_kwargs=config.data.apply_chat_template_kwargs,
    )
    ids = [builder.build_initial_tokens(prompt) for prompt in MESSAGES]
    assert [prompt.prompt_token_ids for prompt in local] == ids
    assert all("<think>" in tokenizer.decode(prompt) for prompt in ids)
    config.data.max_prompt_length = max(map(len, ids))
    assert len(create_rl_dataset([str(file)], config.data, theirs, None)) == len(MESSAGES)
    config.data.max_prompt_length -= 1
    assert len(create_rl_dataset([str(file)], config.data, theirs, None)) < len(MESSAGES)


def test_a_response_that_fills_the_limit_has_ended_at_either_end_token(folder: Path) -> None:
    """The end token is the pad token here, too, and a second one stands in generation_config.json."""
    ends = {"eos_token_id": [2, 0], "pad_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **ends}))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    found = end_tokens(str(folder), tokenizer, trust_remote_code=False)
    assert found == {0, 2}
    responses = [_ids(5, 6, 2), _ids(5, 6, 0), _ids(5, 6, 7), _ids(5, 2)]
    assert finish_reasons(responses, 3, found) == ["stop", "stop", "length", "stop"]


def _ids(*numbers: int) -> Any:
    import torch

    return torch.tensor(numbers)
