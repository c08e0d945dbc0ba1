"""A GGUF file becomes the model that it was made of, its faults are told, and nothing is written if it cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from chat_tokenizers import TEMPLATE
from gguf_files import as_llama_cpp, write_gguf
from safetensors.torch import load_file
from smollm2 import skip_unless_installed
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.checks.generation import eos_warnings, model_eos
from qarl.convert_gguf.__main__ import main

SCALING = "llama.rope.scaling"
UNSCALED: list[dict[str, Any]] = [
    {f"{SCALING}.type": "none", f"{SCALING}.factor": 4.0},
    {f"{SCALING}.factor": 1.0},
    {"llama.rope.scale_linear": 1.0},
]
"""llama.cpp's reading: a factor without a type is linear, and the type `none` ignores the factor."""
LLAMA_3_END = TEMPLATE.replace(
    "{{ message['content'] }}<|im_end|>", "{{ message['content'] }}<|endoftext|>"
)


@pytest.fixture(autouse=True)
def installed() -> None:
    skip_unless_installed("gguf")


def test_weights_are_the_original_s_to_the_bit(tmp_path: Path) -> None:
    """Queries and keys are in another order in the file, so their rows must come back."""
    original = write_gguf(tmp_path / "x.gguf")
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name: value.bfloat16() for name, value in original.state_dict().items()}
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in stored)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.tensor([[1, 5, 9, 2]])
    assert torch.equal(again(ids).logits, original(ids).logits)


def test_rounded_weights_are_those_of_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    original = write_gguf(tmp_path / "x.gguf", kind="Q4_1")
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    kind = GGMLQuantizationType.Q4_1
    for name, weight in original.state_dict().items():
        if weight.ndim == 2:
            blocks = quantize(as_llama_cpp(name, weight).numpy(), kind)
            rounded = torch.from_numpy(dequantize(blocks, kind).copy()).bfloat16()
            assert torch.equal(as_llama_cpp(name, stored[name]), rounded)
    told = capsys.readouterr().out
    assert "Q4_1 (tensors: 16, numbers:" in told and "F32 (tensors: 5, numbers: 320)" in told
    assert "rounds them a second time" in told
    assert "those in F32 are rounded to BF16" in told
    assert json.loads((tmp_path / "out" / "gguf_conversion.json").read_text())["changes"]


@pytest.mark.parametrize(("kind", "rounded"), [("F16", "F16, F32"), ("BF16", "F32")])
def test_the_report_says_which_tensors_are_rounded_to_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, rounded: str
) -> None:
    """F16 has 11 binary digits, F32 24 and BF16 8. The norms are F32, as llama.cpp writes them."""
    write_gguf(tmp_path / "x.gguf", kind=kind)
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert f"those in {rounded} are rounded to BF16" in told and "second time" not in told
    changes = json.loads((tmp_path / "out" / "gguf_conversion.json").read_text())["changes"]
    assert any("are rounded to BF16" in change for change in changes)


def test_the_end_token_and_padding_are_put_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers 5.10 takes `<|im_start|>` for the end, and no pad token. The file names no pad token either."""
    write_gguf(tmp_path / "x.gguf")
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 0
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.model_max_length == 128
    told = capsys.readouterr().out
    assert "eos_token is <|im_end|> (the chat template's)" in told
    assert "transformers' conversion has <|im_start|>" in told
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert eos_warnings(str(tmp_path / "out"), tokenizer, config) == []
    assert model_eos(str(tmp_path / "out"), config) == ("generation_config.json", [2])


def test_a_template_with_another_end_than_the_metadata_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in Llama 3, where answers end with `<|eot_id|>` and texts with `<|end_of_text|>`. Both end a response."""
    write_gguf(tmp_path / "x.gguf", template=LLAMA_3_END)
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 0
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == "<|endoftext|>"
    assert model_eos(str(tmp_path / "out"), None)[1] == [0, 2]
    assert (
        "ends with <|endoftext|>, as in the chat template, or with <|im_end|>"
        in capsys.readouterr().out
    )


def test_tokens_of_the_user_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reward that looks for them must see them, so they are no special tokens."""
    write_gguf(tmp_path / "x.gguf", user_words=("<think>", "</think>"))
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 0
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("<think>x</think><|im_end|>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<think>", "x", "</think>", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>x</think>"
    assert "<think>, </think> are whole tokens" in capsys.readouterr().out


def test_a_file_without_the_types_of_its_tokens(tmp_path: Path) -> None:
    """The format does not demand them. The special tokens that the metadata name are known all the same."""
    write_gguf(tmp_path / "x.gguf", token_types=False)
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 0
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("<|im_end|>").input_ids == [2]


@pytest.mark.parametrize("metadata", UNSCALED, ids=str)
def test_a_rotary_embedding_that_is_not_scaled(metadata: dict[str, Any], tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", metadata=metadata)
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages[0]['role'] }}"])
def test_a_template_that_shows_no_end(template: str, tmp_path: Path) -> None:
    """The metadata's end token stands."""
    write_gguf(tmp_path / "x.gguf", template=template)
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|im_end|>"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "has a scaled rotary embedding"),
    ({"metadata": {f"{SCALING}.factor": 4.0}}, "ignores rope.scaling.factor=4"),
    ({"metadata": {"llama.rope.scale_linear": 2.0}}, "ignores rope.scale_linear=2"),
    ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "ignores rope_freqs.weight"),
    ({"metadata": {"split.count": 3}}, "is one of 3 parts"),
    ({"metadata": {"general.architecture": "rwkv7"}}, "cannot convert a GGUF file of the family"),
    ({"metadata": {"general.architecture": "gpt2"}}, "are refused"),
    ({"tensors": {"blk.0.extra.weight": np.ones(8, np.float32)}}, "do not have the same tensors"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_file_that_would_become_another_model(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "x.gguf", **changes)
    assert refused(tmp_path, capsys).count(said) == 1


def test_a_file_that_is_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "x.gguf")
    whole = (tmp_path / "x.gguf").read_bytes()
    for part in (0.1, 0.5, 0.999):
        (tmp_path / "x.gguf").write_bytes(whole[: int(part * len(whole))])
        assert "cut short or damaged" in refused(tmp_path, capsys)


def test_a_folder_that_exists_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "x.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 2
    assert "exists and is no empty folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_full_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "x.gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "there is no room" in refused(tmp_path, capsys)


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Convert x.gguf, which fails. Return the one error, after a look at what was left."""
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"x.gguf", "x.words"}
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    return " ".join(error.split())
