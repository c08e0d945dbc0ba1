"""Bad configs, data, models and machines: training refuses each with one message, and the doctor says the same.

Everything goes through `qarl.train.main` and the doctor's, as on the command line. A refusal is exit code 2 and one
message on stderr that names what is wrong and what to do. The engine must never be constructed, and nothing is logged.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from bad_runs import (
    CONFIG,
    REWARD_FAULTS,
    EngineConstructed,
    Refusal,
    edit_model_config,
    hide_package,
    lose_a_tensor,
    remove,
    row,
    write_rows,
)
from doctor_rig import cut_the_weights, examine, said
from random_models import save_random_model
from safetensors.torch import load_file, save_file

from qarl.checks import machine
from qarl.doctor.__main__ import main as doctor
from qarl.schemes.w4a16 import W4A16
from qarl.train import main

pytestmark = pytest.mark.usefixtures("startable_run")
Spoil = Callable[[], Any]


@pytest.fixture
def diagnosis(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """As `refusal`, and the doctor has an error with the same first line, place and advice."""

    def both(*overrides: str, words: list[str]) -> str:
        code, findings = examine(*overrides)
        message = refusal(*overrides, words=words)
        what, *rest = message.removeprefix("error: ").strip().splitlines()
        told = [f for f in findings if f["status"] == "error" and f["what"] == what]
        assert code == 1 and told, (what, said(findings, "error"))
        assert all(f.get("fix") for f in findings if f["status"] != "ok")
        wanted = {line.strip() for line in rest if line.strip().startswith(("where:", "fix:"))}
        assert wanted <= {
            f"{key}: {finding.get(key)}" for finding in told for key in ("where", "fix")
        }
        return message

    return both


@pytest.mark.parametrize("scheme", ["w4a16", "bf16"])
def test_the_run_would_start_without_the_faults_below(scheme: str) -> None:
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", f"quant.scheme={scheme}"])


# Configs that cannot be read.


@pytest.mark.parametrize(
    ("overrides", "text", "words"),
    [
        (
            ["rollout.temprature=1.0"],
            CONFIG,
            ["rollout.temprature", "did you mean rollout.temperature?"],
        ),
        (['output_dir="\\0"'], CONFIG, ["output_dir", "pattern"]),
        ([], "name: [unclosed\n", ["broken.yaml"]),
    ],
)
def test_fault_in_the_config(
    refusal: Refusal,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    text: str,
    words: list[str],
) -> None:
    config = "broken.yaml"
    Path(config).write_text(text)
    message = refusal(*overrides, words=words, config=config)
    assert doctor([f"config={config}", *overrides]) == 2
    assert capsys.readouterr().err.strip().endswith(message.strip())
    assert not Path("runs").exists()


# Faults of model, data, rewards and folders: how to spoil the run, arguments, and words of the message.


def rename(file: str, new: str, *empty: str) -> Spoil:
    return lambda: [
        Path("model", file).rename(Path("model", new)),
        *(Path("model", name).touch() for name in empty),
    ]


def config_is(**changes: Any) -> Spoil:
    return lambda: edit_model_config(**changes)


def tie_weights_that_differ() -> None:
    file = Path("model/model.safetensors")
    tensors = load_file(file)
    edit_model_config(tie_word_embeddings=True)
    head = tensors["model.embed_tokens.weight"].clone() + 1
    save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})


SPOILED: dict[str, tuple[Spoil, str]] = {
    "no config": (remove("config.json"), "'model' | model.path | config.json"),
    "weights of another size": (
        config_is(intermediate_size=128),
        "cannot be built from its weights | 'model'",
    ),
    "an adapter": (
        rename("config.json", "adapter_config.json"),
        "'model' | model.path | config.json",
    ),
    "no tokenizer": (remove("tokenizer*"), "no tokenizer | 'model' | tokenizer.json"),
    "no weights": (remove("model.safetensors"), "cannot be loaded | model.path | safetensors"),
    "a tensor is lacking": (
        lose_a_tensor,
        "lacks 1 tensors | model.layers.1.mlp.up_proj.weight | random num",
    ),
    "tied weights that differ": (
        tie_weights_that_differ,
        "ties lm_head.weight to model.embed_tokens.weight",
    ),
    "weights cut short": (cut_the_weights, "model/model.safetensors | cut short"),
    "vocabulary too short": (config_is(vocab_size=48), "vocab_size is 48 | no embedding"),
    "no chat template": (
        remove("chat_template.jinja"),
        "no chat template | where: model | chat_template.jinja",
    ),
    "prompts in UTF-16": (
        lambda: Path("train.jsonl").write_text(json.dumps(row()) + "\n", encoding="utf-16"),
        "cannot read the data file train.jsonl | UTF-16 | iconv",
    ),
    "already quantized": (
        config_is(quantization_config={"quant_method": "gptq"}),
        "already quantized (gptq) | BF16",
    ),
    "row with no ground truth": (
        lambda: write_rows("train.jsonl", [row() for _ in range(5)] + [row(ground_truth=None)]),
        "train.jsonl, row 5 | reward_model.ground_truth",
    ),
    "ground truths that the reward cannot read": (
        lambda: write_rows("train.jsonl", [row(f"t3 t{i}", "(A)") for i in range(8)]),
        "8 of 8 ground truths are no right answers | row 2: '(A)' | reward.check_ground_truths=false",
    ),
    "too many tokens": (
        lambda: write_rows("train.jsonl", [row(" ".join(["t5"] * 20))] * 8),
        "20 tokens | max_prompt_length=16 | data.filter_overlong_prompts=true",
    ),
}
ARGUMENTS = """
model.path=models/none | models/none | model.path
data.max_response_length=1000 | data.max_prompt_length | data.max_response_length | 1016 | 512 positions
quant.group_size=64 quant.align=off | 2 of 14 layers | model.layers.0-1.mlp.down_proj | these layers have 96 inputs
rollout.cpu_kvcache_space_gib=0.0001 | is too small for one sequence of 32 tokens | at least 0.001
quant.scheme=w4a8 | quant.scheme | w4a8 rollouts are refused | quant.kernels=qarl
quant.kernels=qarl | quant.scheme=w4a16 | runs on GPUs, not on cpu | quant.kernels=engine
quant.ignore=[lm_head,k_proj] | k_proj names no linear | re:.*[.](q_proj|k_proj|v_proj)$
quant.ignore=[lm_head,model.layers.0.self_attn.qkv_proj] | names no linear | re:.*[.](q_proj|k_proj|v_proj)$
quant.ignore=[lm_head,re:.*q_proj] | ignored: model.layers.0-1.self_attn.q_proj; | self_attn.k_proj
quant.ignore=[lm_head,model.layers.1.mlp.gate_proj] | ignored: model.layers.1.mlp.gate_proj; quantized: model.layers.1
quant.ignore=[lm_head,re:model] | no layer is left | all 15 linears
data.train_files=data/none.parquet | data/none.parquet | data.train_files
data.val_files=[none.jsonl] | none.jsonl | data.val_files
data.train_files=a.jsonl,b.jsonl | a.jsonl,b.jsonl | data.train_files=[a.jsonl,b.jsonl]
data.max_prompt_length=1 data.filter_overlong_prompts=true | no prompt is left | leaves out all 8 | set data.max_prompt
data.train_batch_size=10 | batches of 10 from 8 prompts | data.train_batch_size
reward.function=none.py:score | none.py | reward.function
output_dir=train.jsonl | train.jsonl/bad | output_dir
"""
"""Arguments that a run refuses, and words of the message."""


@pytest.mark.parametrize("line", ARGUMENTS.strip().splitlines())
def test_training_refuses_arguments_and_the_doctor_says_it(diagnosis: Refusal, line: str) -> None:
    arguments, *words = line.split(" | ")
    diagnosis(*arguments.split(), words=words)


@pytest.mark.parametrize("name", SPOILED)
def test_training_refuses_files_and_the_doctor_says_it(diagnosis: Refusal, name: str) -> None:
    spoil, words = SPOILED[name]
    spoil()
    diagnosis(words=words.split(" | "))


@pytest.mark.parametrize("name", REWARD_FAULTS)
def test_training_refuses_rewards_and_the_doctor_says_it(diagnosis: Refusal, name: str) -> None:
    source, words = REWARD_FAULTS[name]
    Path("rewards.py").write_text(source + "\n")
    diagnosis("reward.function=rewards.py:score", words=words)


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_a_reward_that_fails_names_the_files_of_its_row(diagnosis: Refusal, key: str) -> None:
    """Both have a row 0."""
    source = "val" if key == "data.val_files" else "train"
    for name in ("train", "val"):
        rows = [row() | {"data_source": name} for _ in range(8)]
        write_rows(f"{name}.jsonl", rows)
    code = f"def score(data_source, **_):\n    return 1 / (data_source != {source!r})\n"
    Path("rewards.py").write_text(code)
    diagnosis("reward.function=rewards.py:score", words=[f"row 0, data_source '{source}' of {key}"])


def test_ground_truths_of_your_own_function_are_only_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_rows("train.jsonl", [row(f"t3 t{i}", "(A)") for i in range(8)])
    Path("rewards.py").write_text("def score(solution_str, **_):\n    return -len(solution_str)\n")
    for arguments, count in (
        (["reward.function=rewards.py:score"], 2),
        (["reward.function=rewards.py:score", "reward.check_ground_truths=false"], 0),
        (["reward.function=arithmetic", "reward.check_ground_truths=false"], 0),
    ):
        with pytest.raises(EngineConstructed):
            main(["config=run.yaml", *arguments])
        assert (
            capsys.readouterr().err.count("ground truths are no right answers") == count
        )  # of both files


def test_sizes_that_the_engines_kernel_lacks(diagnosis: Refusal) -> None:
    edit_model_config(hidden_size=64, intermediate_size=80)
    diagnosis(
        "quant.group_size=8",
        words=["multiples of 32", ": model.layers.0-1.mlp.down_proj\n", "[64, 80]"],
    )


@pytest.mark.verl
def test_files_that_verl_would_read(diagnosis: Refusal) -> None:
    spoil, words = SPOILED["prompts in UTF-16"]
    spoil()
    diagnosis("backend=verl", words=words.split(" | "))


@pytest.mark.verl
def test_code_that_verl_would_run(diagnosis: Refusal) -> None:
    edit_model_config(auto_map={"AutoConfig": "code.Config"})
    diagnosis("backend=verl", words=["contains Python code, which verl would run"])


def test_nothing_hides_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    remove("tokenizer*")()
    remove("model.safetensors")()
    Path("val.jsonl").unlink()
    hidden = ["quant.group_size=64", "trainer.logger=wandb", "output_dir=run.yaml"]
    code, findings = examine(
        *hidden, "reward.function=none.py:score", "quant.ignore=[lm_head, 're:.*q_proj', typo]"
    )
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
    assert any(finding.get("why", "").endswith("run.yaml is no folder") for finding in findings)
    assert any("match no linear: typo" in warning for warning in said(findings, "warning"))
    assert any("bands of 3.0e-04" in warning for warning in said(findings, "warning", "loss"))
    assert any(
        what.startswith("not checked: evaluation prompts")
        for what in said(findings, "note", "data")
    )
    assert len(errors) == len(set(errors)), "an input that cannot be loaded is one error"
    assert "the run would fail" in capsys.readouterr().out
    assert (
        main(
            [
                "config=run.yaml",
                "dry_run=true",
                *hidden[:1],
                "quant.ignore=[lm_head, 're:.*q_proj']",
            ]
        )
        == 2
    )
    dry = capsys.readouterr().err
    assert (
        dry.count("error: ") == 3
        and "no tokenizer" in dry
        and "does not divide" in dry
        and "splits layers" in dry
    )


# What is no fault.


def test_a_padded_vocabulary_is_no_fault() -> None:
    """Qwen's own checkpoints have 0.2% more embeddings than tokens."""
    shutil.rmtree("model")
    save_random_model(Path("model"), vocab_size=200, tie=True)
    tokenizer = json.loads(Path("model/tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["t199"]
    Path("model/tokenizer.json").write_text(json.dumps(tokenizer))
    _, findings = examine()
    assert any("lm_head is tied" in what for what in said(findings, "ok", "model"))
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml"])


@pytest.mark.parametrize(
    "argument",
    [
        'quant.ignore=[lm_head, "re:.*self_attn[.][qkv]_proj"]',  # a whole fused group
        'quant.ignore=[lm_head, "re:.*[.](q_proj|k_proj|v_proj)$"]',  # as an error suggests
        'quant.ignore=[lm_head, "re:.*[.](down_proj)$"]',  # the layers that a group of 64 does not divide
        "quant.kernels=dequantized",
    ],
)
def test_ways_around_a_fault(argument: str) -> None:
    with pytest.raises(EngineConstructed):
        main(
            ["config=run.yaml", *(["quant.group_size=64"] if "down" in argument else []), argument]
        )


# The machine.


def test_cpu_without_the_kernels_instructions(
    diagnosis: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"avx2", *W4A16.cpu_flags} - {"avx512f", "avx512_vnni"}
    monkeypatch.setattr(machine, "cpu_flags", lambda: flags)
    diagnosis(words=["quant.scheme", "lacks avx512f and avx512_vnni", "quant.scheme=bf16"])
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", "quant.scheme=bf16"])


@pytest.mark.parametrize("package", ["wandb", "tensorboard", "vllm"])
def test_package_that_is_not_installed(
    diagnosis: Refusal, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    hide_package(monkeypatch, package)
    if package == "vllm":
        diagnosis(words=["vLLM", "make setup"])
    else:
        diagnosis(f"trainer.logger={package}", words=["trainer.logger", f"pip install {package}"])


@pytest.mark.verl
def test_metadata_of_an_older_qarl_in_front(
    diagnosis: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("qarl.egg-info").mkdir()
    Path("qarl.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: qarl\nVersion: 0.0\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    diagnosis("backend=verl", words=["verl does not find QaRL's plugin"])


# The run folder, and the dry run.


def test_dry_run_writes_the_config_imports_no_torch_and_moves_nothing() -> None:
    """Only a model folder that is here is checked, which takes transformers."""
    Path("runs/bad").mkdir(parents=True)
    Path("runs/bad/metrics.jsonl").write_text('{"step": 1}\n')
    program = (
        "import sys; from qarl.train import main;"
        "code = main(['config=run.yaml', 'dry_run=true', 'seed=7', 'model.path=a/b']);"
        "heavy = {'torch', 'vllm', 'transformers', 'verl', 'datasets'} & set(sys.modules);"
        "print('HEAVY', sorted(heavy)); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    assert "seed: 7" in Path("runs/bad/dry_run.yaml").read_text()
    assert os.listdir("runs") == ["bad"]
    assert Path("runs/bad/metrics.jsonl").read_text() == '{"step": 1}\n'


@mock.patch.dict(os.environ)  # a dry run of verl sets its variables
@pytest.mark.verl
def test_a_dry_run_of_what_cannot_run_says_so_last(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["config=qwen3_30b_w4a16.yaml", "dry_run=true"]
    assert main([*run, "rollout.rebuild_on_failure=true"]) == 2
    printed = capsys.readouterr()
    assert "name: qwen3_30b_w4a16" in printed.out and "loss_mode: tbpo" in printed.out
    last = printed.err[printed.err.index("error: ") :]
    assert "supports only rollout.rebuild_on_failure=false" in last
    assert last.rstrip().splitlines()[-1].startswith("  fix: ")
    assert (
        "name: muon" in Path("runs/qwen3_30b_w4a16/dry_run.yaml").read_text()
        and "MuonAdamW" in printed.out
    )
    assert main(run) == 0
