"""The doctor: what training would refuse it says before, in the same words, and it says all of it.

Faults and fixtures are those of `test_bad_input`: a run that would start, in a folder of its own, whose engine must
never be constructed.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_runs import (
    CONFIG_FAULTS,
    FILE_FAULTS,
    REWARD_FAULTS,
    SPLIT_GROUPS,
    edit_model_config,
    hide_package,
    row,
    write_rows,
)
from checkout import ROOT
from cpu_features import needs_vllm_cpu, needs_w4a16_cpu
from doctor_rig import assert_same_diagnosis, cut_the_weights, examine, said
from safetensors.torch import load_file, save_file

from qarl.checks import machine
from qarl.doctor.__main__ import main
from qarl.doctor.findings import Topic
from qarl.doctor.run import TOPICS, make
from qarl.train import main as train
from qarl.trainer import policy

pytestmark = pytest.mark.usefixtures("startable_run")


# A run that would start.


@needs_w4a16_cpu
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8", "bf16"])
def test_a_good_run_is_called_good(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    def load(*args: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(policy.Policy, "load", load)
    code, findings = examine(f"quant.scheme={scheme}", "actor.seq_clip_ratio_high=0.01")
    assert code == 0
    assert said(findings, "error") == []
    assert {f["topic"] for f in findings} == set(TOPICS)
    assert not Path("runs").exists()


@needs_vllm_cpu
@needs_w4a16_cpu
def test_the_quickstart_is_called_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if not (ROOT / "models/tiny-qwen3").is_dir():
        pytest.skip("make model makes it")
    monkeypatch.chdir(ROOT)
    assert main(["config=quickstart.yaml", f"output_dir={tmp_path}"]) == 0  # one may be running in the checkout
    printed = capsys.readouterr().out
    assert "0 warning, 0 error" in printed
    assert "vLLM: CPUWNA16LinearKernel" in printed
    assert "trainer: vllm_cpu_wna16 multiplies 28 layers" in printed
    assert "weight_scale bfloat16" in printed


@needs_vllm_cpu
@needs_w4a16_cpu
def test_layers_that_differ_in_number_alone_are_one_line() -> None:
    _, findings = examine()
    lines = next(f["lines"] for f in findings if f["what"].startswith("trainer: vllm_cpu_wna16"))
    assert len(lines) == 7
    assert "model.layers.0-1.mlp.down_proj  [128, 96]" in lines
    fused = next(f["lines"] for f in findings if f["what"].startswith("vLLM: CPUWNA16LinearKernel"))
    assert "model.layers.0-1.self_attn.qkv_proj  [256, 128]" in fused


# What training refuses, the doctor says in the same words.


def remove(*patterns: str) -> Callable[[], None]:
    def act() -> None:
        for pattern in patterns:
            for path in list(Path("model").glob(pattern)):
                path.unlink()

    return act


def config_is(**changes: Any) -> Callable[[], None]:
    return lambda: edit_model_config(**changes)


def lose_a_tensor() -> None:
    file = Path("model/model.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def rows_are(*rows: dict[str, Any]) -> Callable[[], None]:
    return lambda: write_rows("train.jsonl", [row() for _ in range(5)] + list(rows))


def taken(path: str) -> Callable[[], None]:
    def act() -> None:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("")

    return act


def nothing() -> None:
    pass


Fault = tuple[Callable[[], None], list[str]]

FAULTS: dict[str, Fault] = {
    "no model folder": (nothing, ["model.path=models/none"]),
    "no config": (remove("config.json"), []),
    "config that contradicts itself": (config_is(num_hidden_layers=3), []),
    "weights of another size": (config_is(intermediate_size=128), []),
    "no tokenizer": (remove("tokenizer*"), []),
    "no weights": (remove("model.safetensors"), []),
    "a tensor is lacking": (lose_a_tensor, []),
    "weights cut short": (cut_the_weights, []),
    "vocabulary too long": (config_is(vocab_size=128), []),
    "vocabulary too short": (config_is(vocab_size=48), []),
    "no chat template": (remove("chat_template.jinja"), []),
    "more tokens than positions": (nothing, ["data.max_response_length=1000"]),
    "already quantized": (config_is(quantization_config={"quant_method": "gptq", "bits": 4}), []),
    "group size": (nothing, ["quant.group_size=64"]),
    "group size, align off": (nothing, ["quant.group_size=64", "quant.align=off"]),
    "K of the engine's kernel": (config_is(hidden_size=64, intermediate_size=80), ["quant.group_size=8"]),
    "N of the engine's kernel": (config_is(hidden_size=64, intermediate_size=72), ["quant.group_size=8"]),
    "hidden size of the engine's kernel": (config_is(hidden_size=40), ["quant.group_size=8"]),
    "KV cache that holds no sequence": (nothing, ["rollout.cpu_kvcache_space_gib=0.0001"]),
    "scheme that vLLM does not compute": (nothing, ["quant.scheme=w4a8"]),
    "own kernels that run on GPUs": (nothing, ["quant.kernels=qarl"]),
    **{
        f"ignore: {name}": (nothing, [f"quant.ignore={json.dumps(['lm_head', *ignore])}"])
        for name, (ignore, _) in SPLIT_GROUPS.items()
    },
    "no data file": (nothing, ["data.train_files=data/none.parquet"]),
    "no evaluation file": (nothing, ["data.val_files=[none.jsonl]"]),
    "corrupt parquet": (
        lambda: Path("train.parquet").write_bytes(b"PAR1 and nothing") and None,
        ["data.train_files=train.parquet"],
    ),
    "empty data file": (lambda: Path("train.jsonl").write_text("") and None, []),
    "unknown kind of data file": (nothing, ["data.train_files=run.yaml"]),
    "missing column": (nothing, ["data.prompt_key=question"]),
    "no ground truth": (rows_are(row(ground_truth=None)), []),
    "no messages": (rows_are(row() | {"prompt": []}), []),
    "no data source": (rows_are(row() | {"data_source": None}), []),
    "prompt too long": (rows_are(row(" ".join(["t5"] * 20))), []),
    "everything filtered out": (nothing, ["data.max_prompt_length=1", "data.filter_overlong_prompts=true"]),
    "fewer prompts than a batch": (nothing, ["data.train_batch_size=10"]),
    **{
        f"reward: {name}": (
            lambda source=source: Path("rewards.py").write_text(source + "\n") and None,
            ["reward.function=rewards.py:score"],
        )
        for name, (source, _) in REWARD_FAULTS.items()
    },
    "reward that cannot be found": (nothing, ["reward.function=no_such_module:score"]),
    "output folder is a file": (taken("out"), ["output_dir=out"]),
    "run folder is a file": (taken("out/bad"), ["output_dir=out"]),
}

FAULTS["responses of a rank that are no whole micro-batches"] = (
    nothing,
    ["backend=verl", "actor.log_prob_micro_batch_size_per_gpu=5"],
)

FAULTS["a value for a section of verl's"] = (nothing, ["backend=verl", "verl.trainer=1"])

FAULTS["output folder where none can be made"] = (nothing, ["output_dir=/proc/none/x"])

FAULTS["code that verl would run"] = (config_is(auto_map={"AutoConfig": "code.Config"}), ["backend=verl"])

FAULTS["output folder is a link to itself"] = (lambda: Path("out").symlink_to("out"), ["output_dir=out"])


@pytest.mark.parametrize(
    ("spoil", "arguments"),
    [
        pytest.param(*fault, id=name, marks=pytest.mark.verl if "backend=verl" in fault[1] else ())
        for name, fault in FAULTS.items()
    ],
)
def test_the_doctor_finds_what_training_refuses(
    capsys: pytest.CaptureFixture[str], spoil: Callable[[], None], arguments: list[str]
) -> None:
    spoil()
    assert_same_diagnosis(capsys, *arguments)


@pytest.mark.parametrize("missing", ["avx512_vnni", "avx512f"])
def test_cpu_without_the_instructions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(machine, "cpu_flags", lambda: set(machine.W4A16_CPU_FLAGS) - {missing})
    assert_same_diagnosis(capsys)


@pytest.mark.parametrize(
    ("package", "arguments"),
    [("wandb", ["trainer.logger=wandb"]), ("tensorboard", ["trainer.logger=tensorboard"]), ("vllm", [])],
)
def test_package_that_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str, arguments: list[str]
) -> None:
    hide_package(monkeypatch, package)
    assert_same_diagnosis(capsys, *arguments)


@pytest.mark.verl
def test_metadata_of_an_older_qarl_in_front(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("qarl.egg-info").mkdir()
    Path("qarl.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: qarl\nVersion: 0.0\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    assert_same_diagnosis(capsys, "backend=verl")


@pytest.mark.parametrize("fault", [*CONFIG_FAULTS, *FILE_FAULTS, "no such file"])
def test_a_config_that_cannot_be_read(capsys: pytest.CaptureFixture[str], fault: str) -> None:
    arguments = ["config=none.yaml"]
    if fault in CONFIG_FAULTS:
        arguments = ["config=run.yaml", *CONFIG_FAULTS[fault][0]]
    elif fault in FILE_FAULTS:
        Path("broken.yaml").write_text(FILE_FAULTS[fault][0])
        arguments = ["config=broken.yaml"]
    assert (main(arguments), train(arguments)) == (2, 2)
    mine, theirs = capsys.readouterr().err.split("error: ")[1:]
    assert mine.strip() == theirs.strip()


def test_nothing_hides_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    remove("tokenizer*", "model.safetensors")()
    Path("val.jsonl").unlink()
    hidden = ["quant.group_size=64", "trainer.logger=wandb", "output_dir=run.yaml"]
    code, findings = examine(*hidden, "reward.function=none.py:score", "quant.ignore=[lm_head, 're:.*q_proj', typo]")
    assert code == 1
    errors = said(findings, "error")
    for words in (
        "has no tokenizer",
        "cannot be loaded from",
        "quant.group_size=64 does not divide 2 of",
        "quant.ignore splits layers",
        "none.py",
        "cannot be written",
    ):
        assert any(words in error for error in errors), (words, errors)
    if importlib.util.find_spec("wandb") is None:
        assert any("wandb" in error for error in errors)
    assert any("match no linear: typo" in warning for warning in said(findings, "warning"))
    assert any("bands of 3.0e-04" in warning for warning in said(findings, "warning", "loss"))
    assert any(what.startswith("not checked: whether evaluation prompts") for what in said(findings, "note", "data"))
    assert "the run would fail" in capsys.readouterr().out


def test_a_check_that_breaks_hides_nothing() -> None:
    def check_something(context: Any, topic: Topic) -> None:
        """Whether something holds."""
        raise ZeroDivisionError("by zero")

    topic = Topic("some")
    make(check_something, None, topic)  # type: ignore[arg-type]  # the check never looks at the config
    assert [(f.status, f.what) for f in topic.findings] == [("warning", "the check broke: whether something holds")]
    assert "ZeroDivisionError: by zero" in (topic.findings[0].why or "")


def test_every_check_says_what_it_checks() -> None:
    assert [check for found in TOPICS.values() for check in found if not (check.__doc__ or "").strip()] == []
