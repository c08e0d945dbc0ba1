"""Bad configs, bad data and unfit machines: each is one clear error before the rollout engine starts.

Everything goes through `qarl.train.main`, as on the command line. A refusal is exit code 2 and one message on stderr
that names what is wrong and what to do; the engine must never be constructed, and nothing may be logged.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from bad_runs import (
    CONFIG_FAULTS,
    FILE_FAULTS,
    REWARD_FAULTS,
    EngineConstructed,
    Refusal,
    hide_package,
    refuses,
    row,
    write_rows,
)

from qarl import process
from qarl.checkpoint.run_folder import fresh_run_dir
from qarl.checks import machine
from qarl.config import load_config
from qarl.errors import UserError
from qarl.train import main
from qarl.verl import run as verl

pytestmark = pytest.mark.usefixtures("startable_run")


@pytest.mark.parametrize("scheme", ["w4a16", "bf16"])
def test_the_run_would_start_without_the_faults_below(scheme: str) -> None:
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", f"quant.scheme={scheme}"])


@pytest.mark.parametrize(("overrides", "words"), CONFIG_FAULTS.values(), ids=CONFIG_FAULTS)
def test_fault_in_the_config(refusal: Refusal, overrides: list[str], words: list[str]) -> None:
    refusal(*overrides, words=words)
    assert not Path("runs").exists()


def test_config_file_that_is_not_there(refusal: Refusal) -> None:
    Path("configs").mkdir()
    shutil.copy("run.yaml", "configs/small.yaml")
    refusal(config="smal.yaml", words=["smal.yaml", "no such file", "did you mean config=small.yaml?"])


@pytest.mark.parametrize(("text", "words"), FILE_FAULTS.values(), ids=FILE_FAULTS)
def test_fault_in_the_config_file(refusal: Refusal, text: str, words: list[str]) -> None:
    Path("broken.yaml").write_text(text)
    refusal(config="broken.yaml", words=words)


def test_wrong_omp_num_threads_is_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "all")
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml"])
    assert int(os.environ["OMP_NUM_THREADS"]) >= 1


# The data.


def test_missing_data_file(refusal: Refusal) -> None:
    refusal("data.train_files=data/none.parquet", words=["data/none.parquet", "data.train_files"])
    refusal("data.val_files=[none.jsonl]", words=["none.jsonl", "data.val_files"])


def test_corrupt_parquet(refusal: Refusal) -> None:
    Path("train.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    refusal("data.train_files=train.parquet", words=["train.parquet", "cannot read"])


def test_empty_data_file(refusal: Refusal) -> None:
    Path("train.jsonl").write_text("")
    refusal(words=["train.jsonl", "no rows"])


def test_unknown_kind_of_data_file(refusal: Refusal) -> None:
    refusal("data.train_files=run.yaml", words=["run.yaml", ".parquet"])


def test_missing_column(refusal: Refusal) -> None:
    refusal("data.prompt_key=question", words=["question", "train.jsonl", "data.prompt_key"])


@pytest.mark.parametrize(
    ("bad_row", "words"),
    [
        (row(ground_truth=None), ["reward_model.ground_truth"]),
        (row() | {"prompt": []}, ["empty list"]),
        (row() | {"prompt": [{"role": "user", "content": None}]}, ["content of every message must be text"]),
        (
            row() | {"prompt": [*row()["prompt"], {"role": "assistant", "content": "t1"}]},
            ["ends with a message of"],
        ),
        (row() | {"data_source": None}, ["data_source"]),
        (row(""), ["a prompt has no tokens", "the chat template renders"]),
        (row(" ".join(["t5"] * 20)), ["20 tokens", "max_prompt_length=16", "data.filter_overlong_prompts=true"]),
    ],
    ids=["no ground truth", "no messages", "no content", "an answer", "no data source", "no tokens", "too long"],
)
def test_bad_row(refusal: Refusal, bad_row: dict[str, Any], words: list[str]) -> None:
    write_rows("train.jsonl", [row() for _ in range(5)] + [bad_row])
    refusal(words=["train.jsonl, row 5", *words])


def test_everything_filtered_out(refusal: Refusal) -> None:
    words = ["all 8 prompts are too long", "train.jsonl", "raise data.max_prompt_length"]
    refusal("data.max_prompt_length=1", "data.filter_overlong_prompts=true", words=words)


def test_fewer_prompts_than_a_batch(refusal: Refusal) -> None:
    refusal("data.train_batch_size=10", words=["batches of 10 from 8 prompts", "data.train_batch_size"])


# The reward function.


@pytest.mark.parametrize(("source", "words"), REWARD_FAULTS.values(), ids=REWARD_FAULTS)
def test_bad_reward_function(refusal: Refusal, source: str, words: list[str]) -> None:
    Path("rewards.py").write_text(source + "\n")
    refusal("reward.function=rewards.py:score", words=words)


def test_reward_that_cannot_be_found(refusal: Refusal) -> None:
    refusal("reward.function=no_such_module:score", words=["no_such_module", "reward.function"])
    refusal("reward.function=none.py:score", words=["none.py", "reward.function"])


# What is installed, and where the run is written.


@pytest.mark.parametrize("logger", ["wandb", "tensorboard"])
def test_logger_that_is_not_installed(refusal: Refusal, monkeypatch: pytest.MonkeyPatch, logger: str) -> None:
    hide_package(monkeypatch, logger)
    refusal(f"trainer.logger={logger}", words=["trainer.logger", f"pip install {logger}"])


def test_engine_that_is_not_installed(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_package(monkeypatch, "vllm")
    refusal(words=["vLLM", "make setup"])


@pytest.mark.parametrize("taken", ["out", "out/bad"])
def test_run_folder_that_is_a_file(refusal: Refusal, taken: str) -> None:
    Path(taken).parent.mkdir(exist_ok=True)
    Path(taken).write_text("")
    refusal("output_dir=out", words=["out/bad", "output_dir"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_run_folder_that_cannot_be_written(refusal: Refusal) -> None:
    Path("out").mkdir(mode=0o500)
    refusal("output_dir=out", words=["out/bad", "output_dir", "Permission denied"])


def test_an_earlier_run_is_moved_and_nothing_of_it_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/bad.1").mkdir(parents=True)
    Path("runs/bad/plots").mkdir(parents=True)
    Path("runs/bad/metrics.jsonl").write_text('{"step": 1}\n')
    Path("runs/bad/plots/reward.png").write_text("plot")
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml"])
    assert "runs/bad contained an earlier run, which is now in runs/bad.2" in capsys.readouterr().err
    assert Path("runs/bad.2/metrics.jsonl").read_text() == '{"step": 1}\n'
    assert Path("runs/bad.2/plots/reward.png").read_text() == "plot"
    assert not Path("runs/bad/metrics.jsonl").exists()
    assert Path("runs/bad/config.yaml").exists()


def test_a_run_folder_without_metrics_is_used_as_it_is() -> None:
    Path("runs/bad").mkdir(parents=True)
    Path("runs/bad/config.yaml").write_text("")
    fresh_run_dir(Path("runs/bad"))
    fresh_run_dir(Path("runs/none"))
    assert os.listdir("runs") == ["bad"]


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
    refused = "# not supported by verl: a value of rollout.rebuild_on_failure other than false"
    assert printed.out.splitlines()[-1].startswith(refused)
    last = printed.err[printed.err.index("error: ") :]
    assert "supports only rollout.rebuild_on_failure=false" in last
    assert last.rstrip().splitlines()[-1].startswith("  fix: ")
    assert "name: muon" in Path("runs/qwen3_30b_w4a16/dry_run.yaml").read_text() and "MuonAdamW" in printed.out
    assert main(run) == 0


# The device: one function decides, for both backends.


@pytest.mark.parametrize(
    ("backend", "platform", "gpu", "on_cpu"),
    [
        ("local", "", False, True),
        ("local", "", True, False),
        ("local", "cpu", True, False),  # a variable of verl's
        ("local", "nvidia", False, True),
        ("verl", "", False, True),
        ("verl", "", True, False),
        ("verl", " CPU ", True, True),
        ("verl", "nvidia", False, False),
    ],
)
def test_the_device_of_a_run(
    monkeypatch: pytest.MonkeyPatch, backend: str, platform: str, gpu: bool, on_cpu: bool
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", platform)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(machine, "runs_on_cpu", process.runs_on_cpu)
    monkeypatch.setattr(machine, "cpu_flags", set)
    assert verl.runs_on_cpu is process.runs_on_cpu
    assert process.runs_on_cpu(backend) == on_cpu
    config = load_config(["config=run.yaml", f"backend={backend}"])
    assert refuses(lambda: machine.check_cpu(config), UserError) == on_cpu
