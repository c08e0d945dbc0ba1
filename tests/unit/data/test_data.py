"""Prompts from real files through a real tokenizer, and the order in which they are drawn."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from qarl.data.prompts import (
    Prompt,
    PromptDataset,
    PromptSampler,
    check_disjoint,
    load_prompts,
    with_samples,
)
from qarl.errors import UserError


def row(content: Any = "one", **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "words",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"split": "train", "index": 0},
    } | changes


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return str(path)


def load(
    files: str | list[str], tokenizer: PreTrainedTokenizerFast, **changes: Any
) -> PromptDataset:
    return load_prompts(files, tokenizer=tokenizer, **({"max_prompt_length": 8} | changes))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_rows_become_prompts(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, suffix: str
) -> None:
    files = [
        write(tmp_path / f"train{suffix}", [row("one")]),
        write(tmp_path / "more.jsonl", [row("two three")]),
    ]
    prompts = load(files, tokenizer)
    assert [prompt.prompt_token_ids for prompt in prompts] == [[1, 3, 2], [1, 4, 5, 2]]
    assert [prompt.index for prompt in prompts] == [0, 1]
    assert prompts[1].messages == [{"role": "user", "content": "two three"}]
    assert (prompts[1].data_source, prompts[1].ground_truth) == ("words", "1")
    assert prompts[1].extra_info == {"split": "train", "index": 0}


def test_another_prompt_key_and_no_extra_info(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    item = row("two")
    item["question"] = item.pop("prompt")
    del item["extra_info"]
    prompts = load(write(tmp_path / "train.parquet", [item]), tokenizer, prompt_key="question")
    assert prompts[0].prompt_token_ids == [1, 4, 2]
    assert prompts[0].extra_info == {}


def test_overlong_prompts_are_an_error_or_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [row("one"), row("one two three"), row("two"), row("one two three one")]
    file = write(tmp_path / "train.parquet", rows)
    with pytest.raises(
        UserError,
        match=r"(?s)5 tokens.*row 1.*2 of 4.*max_prompt_length=6.*filter_overlong_prompts",
    ):
        load(file, tokenizer, max_prompt_length=4)
    assert len(load(file, tokenizer, max_prompt_length=6)) == 4

    prompts = load(file, tokenizer, max_prompt_length=4, filter_overlong_prompts=True)
    assert [prompt.index for prompt in prompts] == [0, 2]
    assert prompts.num_filtered == 2


@pytest.mark.parametrize(
    ("item", "part"),
    [
        (row(prompt="one"), "prompt of a row is 'one'"),
        (row(prompt=[{"role": "user"}]), "prompt.0.content"),
        (row(prompt=[{"role": "tool", "content": "one"}]), "no tools here"),
        (
            row(prompt=[{"role": "user", "content": "one"}, {"role": "assistant", "content": "2"}]),
            "assistant",
        ),
        (row(reward_model={"style": "rule", "ground_truth": None}), "reward_model.ground_truth"),
        (row(data_source=None), "data_source"),
        (row(extra_info="x"), "extra_info"),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, item: dict, part: str
) -> None:
    file = write(tmp_path / "train.jsonl", [item])
    with pytest.raises(UserError, match=rf"(?s)(?=.*train\.jsonl, row 0).*{part}"):
        load(file, tokenizer)


def test_a_missing_ground_truth_is_said_in_plain_words(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    item = row(reward_model={"style": "rule", "ground_truth": None})
    with pytest.raises(UserError) as raised:
        load(write(tmp_path / "train.jsonl", [item]), tokenizer)
    assert raised.value.why == "it is missing, but the reward compares answers with it"


def test_bad_files(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    whole = Path(write(tmp_path / "whole.parquet", [row()])).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "bad.jsonl").write_bytes(b"{not json")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "train.csv").write_text("prompt\none\n")
    Dataset.from_list([row()]).select([]).to_parquet(str(tmp_path / "empty.parquet"))
    for name, message in (
        ("none.parquet", r"no such data file: .*none\.parquet"),
        ("", "it is a folder"),
        ("train.csv", "unknown kind of data file"),
        ("cut.parquet", "cannot read the data file"),
        ("bad.jsonl", "cannot read the data file"),
        ("empty.jsonl", "has no rows|empty"),
        ("empty.parquet", "has no rows|empty"),
    ):
        with pytest.raises(UserError, match=message):
            load(str(tmp_path / name), tokenizer)


def test_no_column(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    item = row()
    del item["reward_model"]
    file = write(tmp_path / "train.parquet", [item])
    with pytest.raises(UserError, match="missing columns question, reward_model") as error:
        load(file, tokenizer, prompt_key="question")
    assert "the file has: data_source, prompt, extra_info" in str(error.value)
    assert "set data.prompt_key" in str(error.value)
    with pytest.raises(UserError, match="missing column reward_model") as error:
        load(file, tokenizer)
    assert "prompt_key" not in str(error.value), "the prompts are there"


def test_check_disjoint_counts_shared_prompts(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    train = load(write(tmp_path / "train.parquet", [row("one"), row("two")]), tokenizer)
    val = load(write(tmp_path / "val.parquet", [row("two"), row("three"), row("two")]), tokenizer)
    assert check_disjoint(train, val) == 2
    assert check_disjoint(train[:1], val) == 0


def test_an_epoch_visits_each_prompt_once() -> None:
    sampler = PromptSampler(12, 4, seed=1)
    epochs = [list(itertools.chain.from_iterable(itertools.islice(sampler, 3))) for _ in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order() -> None:
    assert list(itertools.islice(PromptSampler(5, 2, shuffle=False), 3)) == [[0, 1], [2, 3], [0, 1]]
    # Pinned: resumed runs of another process or Python must go on in the same order.
    assert (
        next(PromptSampler(50, 5, seed=3))
        == [8, 24, 49, 34, 21]
        != next(PromptSampler(50, 5, seed=4))
    )


def test_a_restored_sampler_goes_on() -> None:
    sampler, restored = PromptSampler(10, 3, seed=7), PromptSampler(10, 3, seed=7)
    list(itertools.islice(sampler, 4))
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert list(itertools.islice(restored, 5)) == list(itertools.islice(sampler, 5))


@pytest.mark.parametrize("batch_size", [0, 6])
def test_impossible_batches_are_refused(batch_size: int) -> None:
    with pytest.raises(UserError, match=f"batches of {batch_size} from 5"):
        PromptSampler(5, batch_size)


@pytest.mark.parametrize(
    ("own", "counts"), [([None, None], [8, 8]), ([4, None], [4, 1]), ([None, 1, 2], [1, 1, 2])]
)
def test_answers_to_a_row_beside_others_with_a_number(
    own: list[int | None], counts: list[int]
) -> None:
    """Of a file without the column the run's val_n counts; otherwise a row without a number has one, as in verl."""
    prompts = [Prompt(i, "sums", [], [1], "2", samples=samples) for i, samples in enumerate(own)]
    assert [prompt.samples for prompt in with_samples(prompts, 8)] == counts
