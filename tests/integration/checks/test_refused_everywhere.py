"""What cannot run, or can teach nothing, is refused by the run, its dry run and the doctor, in the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bad_runs import EngineConstructed, Refusal, edit_model_config, lose_a_tensor, remove
from damaged_files import POINTER
from doctor_rig import examine, said

from qarl.doctor.__main__ import main as doctor
from qarl.kernels.cpu import layer_ops
from qarl.train import main

pytestmark = pytest.mark.usefixtures("startable_run")


def head_size(size: int) -> Callable[[], None]:
    return lambda: edit_model_config(head_dim=size)


INDEX = Path("model/model.safetensors.index.json")


def lose_a_shard() -> None:
    Path("model/model.safetensors").rename("model/model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    INDEX.write_text(json.dumps(index))


def damage_the_index() -> None:
    Path("model/model.safetensors").rename("model/model-1.safetensors")
    INDEX.write_text("{")


MODELS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "heads of 16": (head_size(16), ["heads of 16", "model.path", "32, 64, 80"]),
    "heads of 40": (head_size(40), ["heads of 40", "model.path", "32, 64, 80"]),
    "an unknown key": (
        lambda: edit_model_config(use_gated_attention=True),
        ["use_gated_attention=True", "config.json", "unknown key"],
    ),
}
for _file in ("model.safetensors", "tokenizer.json", "config.json"):
    MODELS[f"a pointer of git-lfs in place of {_file}"] = (
        partial(Path("model", _file).write_text, POINTER),
        [_file, "git-lfs", "model.path", "lfs pull"],
    )
WEIGHTS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "no weights": (remove("model.safetensors"), ["cannot be loaded", "model.path", "safetensors"]),
    "a tensor is lacking": (lose_a_tensor, ["lacks 1 tensors", "layers.1.mlp.up_proj", "random"]),
    "weights of another size": (
        partial(edit_model_config, intermediate_size=128),
        ["cannot be built from its weights", "config.json"],
    ),
    "a shard is missing": (
        lose_a_shard,
        ["1 of 2 weight files are missing", "model-2.safetensors", "model.path"],
    ),
    "a damaged index": (
        damage_the_index,
        ["cannot be loaded", "index.json is damaged"],
    ),
}
CONFIGS = [
    ("rollout.top_k=1", "would sample only the likeliest token"),
    ("rollout.top_p=1e-4", "all responses to a prompt would be the same"),
    ("rollout.temperature=0.01", "all responses to a prompt would be the same"),
    ("optim.lr_warmup_steps=1000", "no step would have the full learning rate"),
    ("lora.r=513", "at most rank 512"),
    ("lora.r=8 lora.target_modules=['re:.*proj']", "is no target"),
    ("lora.path=nowhere", "there is no folder nowhere"),
    ("data.truncation=error", "did you mean data.filter_overlong_prompts?"),
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["local", pytest.param("verl", marks=pytest.mark.verl)])
def test_a_model(refusal: Refusal, name: str, backend: str) -> None:
    spoil, words = MODELS[name]
    spoil()
    chosen = f"backend={backend}"
    message = refusal(chosen, words=words)
    assert refusal(chosen, "dry_run=true", words=words) == message
    code, findings = examine(chosen)
    what = message.removeprefix("error: ").splitlines()[0].strip()
    assert code == 1
    assert what in said(findings, "error")


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("backend", ["local", pytest.param("verl", marks=pytest.mark.verl)])
def test_weights(refusal: Refusal, name: str, backend: str) -> None:
    """A dry run does not need them."""
    spoil, words = WEIGHTS[name]
    spoil()
    chosen = f"backend={backend}"
    message = refusal(chosen, words=words)
    code, findings = examine(chosen)
    assert code == 1
    assert message.removeprefix("error: ").splitlines()[0].strip() in said(findings, "error")


@pytest.mark.parametrize(("arguments", "words"), CONFIGS)
def test_a_config(
    refusal: Refusal, capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    message = refusal(*arguments.split(), words=[words])
    assert refusal(*arguments.split(), "dry_run=true", words=[words]) == message
    assert doctor(["config=run.yaml", *arguments.split()]) == 2
    assert capsys.readouterr().err.strip().endswith(message.strip())


def test_the_head_sizes_are_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them start, by vLLM's own list."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert layer_ops.head_sizes() == tuple(CPUAttentionBackend.get_supported_head_sizes())
    for size in (64, 112):
        edit_model_config(head_dim=size)
        _, findings = examine()
        assert not [what for what in said(findings, "error") if "heads of" in what]


WARNINGS: dict[str, Any] = {
    "bands": ([], "bands of 3.0e-04 are narrow for responses of at most 16 tokens"),
    "one band of many": (
        ["actor.seq_clip_ratio_low=3e-4"],
        "actor.seq_clip_ratio_low has no effect",
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning(capsys: pytest.CaptureFixture[str], name: str) -> None:
    arguments, words = WARNINGS[name]
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", *arguments])
    assert words in capsys.readouterr().err
    assert main(["config=run.yaml", "dry_run=true", *arguments]) == 0
    assert words in capsys.readouterr().err
    _, findings = examine(*arguments)
    assert any(words in what for status in ("warning", "note") for what in said(findings, status))


def test_a_vocabulary_that_is_larger_than_the_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    """Only verl masks the other ids on one side. In one process both sides sample them."""
    tokenizer = json.loads(Path("model/tokenizer.json").read_text())
    for token in ("t62", "t63"):
        del tokenizer["model"]["vocab"][token]
    Path("model/tokenizer.json").write_text(json.dumps(tokenizer))
    words = "the model has 2 token ids that the tokenizer lacks"
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml"])
    assert words in capsys.readouterr().err
    assert words in said(examine()[1], "warning")


@pytest.mark.verl
def test_the_same_vocabulary_in_verl(refusal: Refusal) -> None:
    edit_model_config(vocab_size=128)
    refusal("backend=verl", words=["64 entries", "vocab_size is 128", "masked in the rollout"])
    assert any("vocab_size is 128" in what for what in said(examine("backend=verl")[1], "error"))
