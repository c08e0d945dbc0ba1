"""The tiny model's folder and data as others meet them: through transformers, `datasets` and the rewards."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from qarl.data.prompts import check_disjoint, check_vocabulary, load_prompts
from qarl.demo import tiny_model
from qarl.errors import UserError

SMALL = {"steps": 2, "train_size": 40, "test_size": 8}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    paths = folder / "models" / "tiny", folder / "data"
    run(*paths)
    return paths


def run(
    output: Path, data: Path, experts: int = 0, seed: int = 0, *, overwrite: bool = False
) -> None:
    recipe = tiny_model.Recipe.of(tiny_model.QUICKSTART, experts)
    changed = replace(recipe, output=output, data=data, seed=seed, **SMALL)
    tiny_model.make_missing(changed, overwrite=overwrite)


def test_the_folder_is_an_ordinary_one(made: tuple[Path, Path]) -> None:
    weights = load_file(made[0] / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(made[0])
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1e6
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.in_features % 32 == 0 and module.out_features % 32 == 0
    assert check_vocabulary(tokenizer, model.config.vocab_size) == 0
    assert model.config.vocab_size % 32 == 0
    assert GenerationConfig.from_pretrained(made[0]).eos_token_id == tokenizer.eos_token_id


def test_a_mixture_of_experts_for_the_same_task(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shutil.copytree(made[1], tmp_path / "data")
    run(tmp_path / "moe", data, experts=8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    config, tokenizer = model.config, AutoTokenizer.from_pretrained(tmp_path / "moe")
    assert (config.model_type, config.num_experts, config.num_experts_per_tok) == (
        "qwen3_moe",
        8,
        2,
    )
    assert config.vocab_size == len(tokenizer)
    stacks = [p for p in model.parameters() if p.ndim == 3]
    assert len(stacks) == 2 * config.num_hidden_layers and all(
        size % 32 == 0 for p in stacks for size in p.shape[1:]
    )
    torch.manual_seed(0)
    fresh = tiny_model.make_model(tiny_model.make_tokenizer(), 8).bfloat16()
    pairs = zip(model.named_parameters(), fresh.parameters(), strict=True)
    assert not [name for (name, p), before in pairs if p.ndim >= 2 and torch.equal(p, before)], (
        "all are trained"
    )
    run(made[0], data)
    assert "up to date" in capsys.readouterr().out, "the data are the dense model's, too"


def test_the_tokenizer_reads_any_text_and_renders_chats(made: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    for text in ("48310+7294", "0+4+0=04 =55604", "two words\n", "naïve 漢字 🙂"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+2"}]
    special = {
        name: tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("system", "user", "assistant")
    }
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    plain = {text: tokenizer(text)["input_ids"] for text in ("s", "1+2")}
    expected = [
        special["system"],
        *plain["s"],
        special["user"],
        *plain["1+2"],
        special["assistant"],
    ]
    assert ids == expected


def test_data_is_in_verls_schema_and_disjoint(made: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    splits = {}
    for split, size in (("train", 40), ("test", 8)):
        file = str(made[1] / f"{split}.parquet")
        splits[split] = load_prompts(file, tokenizer=tokenizer, max_prompt_length=16)
        assert len(splits[split]) == size
        for i, prompt in enumerate(splits[split]):
            a, b = prompt.messages[0]["content"].split("+")
            assert prompt.messages == [{"role": "user", "content": f"{a}+{b}"}]
            assert prompt.ground_truth == str(int(a) + int(b))
            assert prompt.extra_info == {"split": split, "index": i}
    assert check_disjoint(splits["train"], splits["test"]) == 0


def test_labels_cover_the_response() -> None:
    make, task = tiny_model, tiny_model.QUICKSTART
    tokenizer, pairs = make.make_tokenizer(), task.draw(2, random.Random(1), set())
    tokens, labels = make.make_batch(tokenizer, pairs)
    for i, pair in enumerate(pairs):
        answer = labels[i][labels[i] != make.IGNORE_INDEX]
        assert tokenizer.decode(answer) == task.response_text(pair) + tokenizer.eos_token
        asked = [{"role": "user", "content": task.prompt_text(pair)}]
        prompt_length = len(
            tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        )
        assert (labels[i, : prompt_length - 1] == make.IGNORE_INDEX).all()
        assert labels[i, prompt_length - 1] == answer[0] == tokens[i, prompt_length]


def test_a_second_run_does_nothing_and_other_settings_are_refused(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, data = (
        shutil.copytree(made[0], tmp_path / "model"),
        shutil.copytree(made[1], tmp_path / "data"),
    )
    weights, before = output / "model.safetensors", (output / "model.safetensors").read_bytes()
    inode = weights.stat().st_ino
    run(output, data)
    assert "up to date" in capsys.readouterr().out
    assert weights.stat().st_ino == inode

    weights.unlink()
    run(output, data)
    assert weights.read_bytes() == before, "the same seed gives the same weights"

    with pytest.raises(UserError, match=r"made with other arguments") as refused:
        run(output, data, seed=1)
    assert refused.value.why == "seed: 0 -> 1" and weights.read_bytes() == before
    run(output, data, seed=1, overwrite=True)
    assert weights.read_bytes() != before
    assert json.loads((output / "made_with.json").read_text())["settings"]["seed"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "model"]

    (data / "test.parquet").unlink()
    run(output, data, seed=1)
    assert (data / "test.parquet").exists()


def test_it_replaces_only_what_it_made(tmp_path: Path) -> None:
    output = tmp_path / "model"
    output.mkdir()
    (output / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="will not replace"):
        run(output, tmp_path / "data")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine.txt"]


@pytest.mark.parametrize("in_the_way", ["models/tiny", "models", "data"])
def test_a_file_in_the_way_is_refused_before_the_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_the_way: str
) -> None:
    monkeypatch.setattr(tiny_model, "warm_start", lambda *words, **keys: pytest.fail("it trains"))
    file = tmp_path / in_the_way
    file.parent.mkdir(exist_ok=True)
    file.write_text("of the user")
    with pytest.raises(UserError, match=f"rename what has the name {file} now"):
        run(tmp_path / "models" / "tiny", tmp_path / "data" / "sums")
    assert file.read_text() == "of the user"
