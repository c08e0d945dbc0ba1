"""What a reward function gets from verl: the values that stand in the file, as from the local backend.

The way of a row through verl is gone without Ray: dataset, batch, the copy that a process gets, and the reward manager.
"""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_runs import row
from damaged_files import DAMAGED
from field_values import JSON, TABLE, rows_of, write_rows
from random_models import save_tokenizer
from transformers import AutoTokenizer
from verl_runs import quickstart

from qarl.data.prompts import load_prompts
from qarl.data.response_text import response_texts
from qarl.errors import UserError

pytest.importorskip("verl")

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

from qarl.verl.dataset import Rows
from qarl.verl.run import verl_config

pytestmark = pytest.mark.usefixtures("own_environment")

RECORD = """
SEEN = []

def record(data_source, solution_str, ground_truth, extra_info=None):
    SEEN.append((solution_str, data_source, ground_truth, extra_info["value"], extra_info["list"]))
    with open(__file__ + ".seen", "a") as file:
        file.write(repr(SEEN[-1]) + "\\n")
    return 0.0
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, 64)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def composed(tmp_path: Path) -> Any:
    """verl's config of a run whose reward writes down what it gets."""
    function = tmp_path / "record.py"
    function.write_text(RECORD)
    return verl_config(quickstart(**{"reward.function": f"{function}:record"}), on_cpu=True)


def rewarded(config: Any, tokenizer: Any, file: str, response: list[int]) -> list[str]:
    """What the reward function gets for each row of `file` and `response`, as text."""
    dataset = create_rl_dataset([file], config.data, tokenizer, None)
    batch = tu.get_tensordict(collate_fn([dataset[i] for i in range(len(dataset))]))
    batch = pickle.loads(pickle.dumps(batch))
    seen = Path(
        config.reward.custom_reward_function.reward_kwargs.function.removesuffix(":record")
        + ".seen"
    )
    seen.unlink(missing_ok=True)

    async def score() -> None:
        manager = load_reward_manager(config, tokenizer)
        for i in range(len(batch)):
            fields = {key: getattr(value[i], "data", value[i]) for key, value in batch.items()}
            del fields["dummy_tensor"]
            await manager.run_single(one_response(fields, response))

    asyncio.run(score())
    return seen.read_text().splitlines()


def one_response(fields: dict[str, Any], response: list[int]) -> DataProto:
    """As verl's `AgentLoopWorker._compute_score` makes it."""
    ids = torch.tensor([response])
    tensors = TensorDict({"responses": ids, "attention_mask": torch.ones_like(ids)}, batch_size=1)
    extra = {"__num_turns__": np.array([2]), "tool_extra_fields": np.array([{}], dtype=object)}
    return DataProto(
        batch=tensors, non_tensor_batch={k: np.array([v]) for k, v in fields.items()} | extra
    )


def test_a_reward_gets_the_values_of_the_file(
    tmp_path: Path, tokenizer: Any, composed: Any
) -> None:
    """One test for all values, because verl's config takes a second."""
    cases = [(name, suffix, *TABLE[name]) for name in TABLE for suffix in (".jsonl", ".parquet")]
    cases += [(name, ".jsonl", values, values) for name, values in JSON.items()]
    got, wanted = {}, {}
    for name, suffix, values, read in cases:
        file = write_rows(tmp_path / f"x{suffix}", rows_of(values))
        got[name, suffix] = rewarded(composed, tokenizer, file, [5, 6])
        wanted[name, suffix] = [repr(("t5 t6", "values", value, value, [value])) for value in read]
    assert {case: seen for case, seen in got.items() if seen != wanted[case]} == {}


@pytest.mark.parametrize("keep", [False, True])
def test_special_tokens_of_a_response(tmp_path: Path, tokenizer: Any, keep: bool) -> None:
    """t1 is the token that ends a response. The reward gets the text that the local backend gives it."""
    function = tmp_path / "record.py"
    function.write_text(RECORD)
    settings = {"reward.function": f"{function}:record", "reward.keep_special_tokens": keep}
    config = verl_config(quickstart(**settings), on_cpu=True)
    file = write_rows(tmp_path / "x.jsonl", rows_of(["7"]))
    seen = rewarded(config, tokenizer, file, [5, 6, 1])
    text = response_texts(tokenizer, [[5, 6, 1]], keep_special_tokens=keep)[0]
    assert text == ("t5 t6 t1" if keep else "t5 t6")
    assert seen == [repr((text, "values", "7", "7", ["7"]))]


def test_files_with_different_columns(tmp_path: Path, tokenizer: Any, composed: Any) -> None:
    """verl cannot join such files; locally each is read alone."""
    plain = [row(f"t{i}") for i in range(3)]
    more = [
        row("t9") | {"__rollout_n__": 4, "extra_info": {"level": "5"}},
        row("t8") | {"__rollout_n__": None},
    ]
    files = [write_rows(tmp_path / "a.parquet", plain), write_rows(tmp_path / "b.jsonl", more)]
    dataset = create_rl_dataset(files, composed.data, tokenizer, None)
    assert collated(dataset, "__rollout_n__") == [1, 1, 1, 4, 1]
    local = load_prompts(files, tokenizer=tokenizer, max_prompt_length=64)
    assert collated(dataset, "raw_prompt") == [prompt.messages for prompt in local]


def collated(dataset: Any, column: str) -> list[Any]:
    return list(collate_fn([dataset[i] for i in range(len(dataset))])[column])


def test_rows_are_chosen_and_filtered_as_by_verl(
    tmp_path: Path, tokenizer: Any, composed: Any
) -> None:
    rows = [row(" ".join(["t5"] * (1 + i % 4)) + f" t{i}") for i in range(12)]
    file = write_rows(tmp_path / "x.parquet", rows)
    lengths = [
        len(prompt.prompt_token_ids)
        for prompt in load_prompts(file, tokenizer=tokenizer, max_prompt_length=99)
    ]
    composed.data.filter_overlong_prompts = True
    composed.data.max_prompt_length = max(lengths) - 1
    for key, value in {
        "cache_dir": str(tmp_path / "cache"),
        "filter_overlong_prompts_workers": None,
    }.items():
        OmegaConf.update(composed, f"data.{key}", value, force_add=True)
    for limit, shuffle in ((-1, True), (3, True), (3, False), (20, False)):
        composed.data.shuffle = shuffle
        ours = create_rl_dataset([file], composed.data, tokenizer, None, max_samples=limit)
        verls = RLHFDataset([file], tokenizer, composed.data, max_samples=limit)
        assert type(ours) is not RLHFDataset and 0 < len(ours) < len(rows)
        assert collated(ours, "raw_prompt") == collated(verls, "raw_prompt")
        assert "dataframe" not in vars(pickle.loads(pickle.dumps(ours)))


def test_a_file_that_was_damaged_after_the_checks(
    tmp_path: Path, tokenizer: Any, composed: Any
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("{")
    with pytest.raises(UserError, match="cannot read the data file"):
        create_rl_dataset([str(file)], composed.data, tokenizer, None)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(tmp_path: Path, name: str) -> None:
    """Rows that only the checks before a run refuse are rows here."""
    file, write, words = DAMAGED[name]
    write(tmp_path / file)
    path = str(tmp_path / file)
    readable = words is None or any("row " in word or "column" in word for word in words)
    if readable and name != "nested":
        assert len(Rows.read([path])) > 0
        return
    with pytest.raises(UserError) as refusal:
        Rows.read([path])
    assert all(
        any(either in str(refusal.value) for either in word.split("|")) for word in words or []
    )
