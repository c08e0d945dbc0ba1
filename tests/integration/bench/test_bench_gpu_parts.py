"""The parts of scripts/gpu_check.py: a wrong argument or key must not be seen on the device first."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from checkout import ROOT

from qarl.bench import kernels, steps
from qarl.checks.check import RunInputs
from qarl.config import Config, load_config
from qarl.data.prompts import check_vocabulary
from qarl.data.scoring import score_responses

sys.path.insert(0, str(ROOT / "scripts"))
import gpu_check
import gpu_parts
from gpu_parts import Part

BENCHES = [part.name for part in gpu_parts.PARTS.values() if "qarl.bench" in part.gpu]


@pytest.mark.parametrize("name", BENCHES)
def test_the_benchmarks_arguments_are_valid_on_both_devices(name: str) -> None:
    part = gpu_parts.PARTS[name]
    for command, device in ((part.gpu, "cuda"), (part.cpu, "cpu")):
        if command is not None:
            kind, *options = command.format(report="f/report.json").split()[2:]
            arguments = (kernels if kind == "kernels" else steps).Arguments.parse(kind, options)
            assert arguments.device == device and arguments.json == Path("f/report.json")


def runs_of(parts: Iterable[Part], folder: Path, gpus: int) -> Iterator[tuple[Part, Config]]:
    """The parts that train, and their configs, with the real models' config.json where a part makes a model."""
    for part in parts:
        words = shlex.split(
            part.gpu.format(folder=folder, scratch=folder, output=folder, report="r", gpus=gpus)
        )
        if words[0] == "scripts/profile_step.py":
            yield part, load_config(words[3:])
        elif words[:2] == ["-m", "qarl.train"]:
            yield part, load_config(words[2:])


@pytest.fixture
def made(tmp_path: Path) -> Path:
    for name, folder in (
        ("Qwen3-0.6B", ""),
        ("Qwen3-0.6B", "Qwen3-0.6B"),
        ("Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("Qwen3-8B", gpu_parts.WIDE),
    ):
        (tmp_path / folder / "model").mkdir(parents=True)
        config_file = ROOT / "qarl" / "bench" / "models" / name / "config.json"
        (tmp_path / folder / "model" / "config.json").write_text(config_file.read_text())
    return tmp_path


def test_the_training_parts_cover_schemes_and_levels(made: Path) -> None:
    seen = set()
    for part, config in runs_of((*gpu_parts.FIRST, *gpu_parts.SECOND), made, 1):
        seen.add((config.quant.scheme, config.quant.align, config.rollout.enforce_eager))
        assert (config.quant.kernels == "qarl") == part.name.endswith("_qarl")
        steps = {"profile": 3, "hundred": 100}.get(
            part.name, 5 if part.name.startswith("shape") else 2
        )
        assert (
            config.trainer.total_training_steps == steps
        )  # two publishes behind the first, or more
    assert {scheme for scheme, _, _ in seen} == {"w4a16", "w8a8", "fp8", "bf16"}
    assert {
        ("w4a16", "linears", True),
        ("w4a16", "linears", False),
        ("w8a8", "model", False),
    } <= seen


@pytest.mark.verl
@pytest.mark.parametrize("gpus", [2, 8])
def test_verl_takes_the_keys_of_the_parts_that_run_in_it(
    made: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """What a dry run does, for a machine with GPUs. A wrong key is not seen on the device first."""
    pytest.importorskip("verl")
    from qarl.verl import checks
    from qarl.verl.run import verl_config

    monkeypatch.chdir(ROOT)
    configs = {}
    for part, config in runs_of(gpu_parts.PARTS.values(), made, gpus):
        if config.backend == "verl":
            checks.refuse_unsupported(config)
            configs[part.name] = verl_config(config, on_cpu=False)
    assert configs.keys() == {
        "verl",
        "verl_w4a16",
        "lora_verl",
        "experts_verl",
        "ranks",
        "tensor_parallel",
        "short_30b",
        "whole_30b",
    }
    short = configs["short_30b"]
    assert short.data.train_batch_size == 64 and short.data.max_response_length == 2048
    assert short.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 8192
    assert short.trainer.n_gpus_per_node == gpus and not short.trainer.val_before_train
    assert configs["tensor_parallel"].actor_rollout_ref.rollout.tensor_model_parallel_size == 2


def test_a_random_model_has_what_a_run_needs(tmp_path: Path) -> None:
    """With the sizes of a tiny model. Made a second time, it stays as it is."""
    import random_model
    from random_models import save_random_model

    tiny = save_random_model(tmp_path / "tiny", vocab_size=512)
    made = ["--model", str(tiny), "--output", str(tmp_path / "Qwen3-0.6B")]
    assert random_model.main(made) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "Qwen3-0.6B").rglob("*")}
    assert random_model.main(made) == 0
    assert before == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "Qwen3-0.6B").rglob("*")
    }
    part = gpu_parts.PARTS["shape_w4a16"]
    ((_, config),) = runs_of([part], tmp_path, 1)
    run = RunInputs(config)
    assert len(run.train_prompts) == random_model.PROMPTS
    assert {len(prompt.prompt_token_ids) for prompt in run.train_prompts} == {random_model.WORDS}
    check_vocabulary(run.tokenizer, run.hf_config.vocab_size, max_unused=0)
    assert score_responses(run.reward_fn, run.train_prompts[:1], ["t1 t2 t4"]) == [2 / 3]


def test_what_decides_most_comes_first_and_fits_half_an_hour() -> None:
    first = gpu_parts.FIRST
    assert [part.name for part in first[:3]] == ["environment", "probe", "tuning"]
    assert not any("vllm" in part.needs for part in first[:3]), "one library of it is enough"
    names = [part.name for part in first]
    assert names.index("wide_w8a8") < names.index("verl") < names.index("hundred")
    assert sum(part.seconds for part in first) <= 1500
    assert all(part.cpu is not None for part in first), "every part is rehearsed"
    for part in gpu_parts.PARTS.values():
        for path in re.findall(r"(?:tests|scripts)/[\w/.]+", part.gpu):
            assert (ROOT / path).exists(), path
        assert gpu_parts.FIRST_CALL * part.seconds <= gpu_check.TOTAL_SECONDS, (
            "a call must be able to finish it"
        )


def test_the_page_says_what_each_part_prints_and_what_is_likely_to_fail() -> None:
    page = (ROOT / "docs/do/gpu.md").read_text()
    rows = re.findall(r"^\| (`\w+`[^|]*) \| [^|]+ \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert names == [part.name for part in (*gpu_parts.FIRST, *gpu_parts.SEVERAL)]
