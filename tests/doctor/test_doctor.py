"""The doctor: what training would refuse it says before, in the same words, and it says all of it.

Faults and fixtures are those of `test_bad_input`: a run that would start, in a folder of its own, whose engine must
never be constructed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_runs import (
    CONFIG,
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
from checkpoint_state import interrupted_run
from cpu_features import needs_w4a16_cpu
from doctor_rig import assert_same_diagnosis, examine, said, topic_of
from random_models import save_random_model
from safetensors.torch import load_file, save_file

from qarl.checks import machine
from qarl.checks.memory import ModelSize, checkpoint_bytes
from qarl.config import load_config
from qarl.doctor import disk, kernels, memory, packages
from qarl.doctor.__main__ import main
from qarl.doctor.context import Context
from qarl.doctor.findings import Topic
from qarl.doctor.run import TOPICS, make
from qarl.doctor.shapes import VOCABULARY_PADDING
from qarl.doctor.target import GPUS, Target, find_target, this_machine
from qarl.errors import UserError
from qarl.process import configure_vllm_process
from qarl.train import main as train
from qarl.trainer import policy
from qarl.trainer.resume import open_run

pytestmark = pytest.mark.usefixtures("startable_run")

MODELS = ROOT / "qarl" / "bench" / "models"


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


def cut_the_weights() -> None:
    path = Path("model/model.safetensors")
    path.write_bytes(path.read_bytes()[:-1000])


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
FAULTS["what verl cannot do"] = (nothing, ["backend=verl", "optim.master_dtype=bf16"])
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


# Another machine.

BIG = """\
name: big
backend: verl
model: {path: PATH, gradient_checkpointing: true}
data:
  train_files: not/here.parquet
  train_batch_size: 64
  max_prompt_length: 1024
  max_response_length: 3072
rollout: {n: 8, gpu_memory_utilization: 0.5}
reward: {function: math_verify}
actor:
  ppo_mini_batch_size: 64
  ppo_micro_batch_size_per_gpu: 1
  log_prob_micro_batch_size_per_gpu: 1
trainer: {total_training_steps: 100, val_before_train: false, save_final: false}
"""


def examine_big(name: str, gpus: int, parallel: int, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings on GPUs of another machine."""
    Path("big.yaml").write_text(BIG.replace("PATH", str(MODELS / name)))
    return examine(
        f"trainer.n_gpus_per_node={gpus}",
        f"rollout.tensor_model_parallel_size={parallel}",
        "doctor.device=h100",
        *arguments,
        config="big.yaml",
    )


@pytest.mark.verl
@pytest.mark.parametrize(
    ("name", "gpus", "parallel", "params"),
    [("Qwen2.5-Math-1.5B", 1, 1, "1.54"), ("Qwen2.5-Math-7B", 8, 2, "7.62"), ("Qwen3-8B", 8, 2, "8.19")],
)
def test_public_models_on_their_gpus(name: str, gpus: int, parallel: int, params: str) -> None:
    code, findings = examine_big(name, gpus, parallel)
    assert said(findings, "error") == []
    assert all(f.get("fix") for f in findings if f["status"] != "ok")
    assert code == 0
    assert any(f"{params} billion parameters" in what for what in said(findings, "ok", "model"))
    assert {f["topic"] for f in findings} >= {"model", "layer sizes", "kernels", "published tensors", "memory"}
    left_out = said(findings, "note", "model")
    assert any("tokenizer" in what for what in left_out)
    assert any("weights are whole" in what for what in left_out)
    assert "packages" not in {f["topic"] for f in findings}
    assert any("this one's CPU" in what for what in said(findings, "note", "machine"))
    assert any("trainer: reference multiplies" in what for what in said(findings, "warning", "kernels"))
    assert any("fall back to linears" in what for what in said(findings, "warning", "kernels"))


def test_the_mixture_of_experts_says_what_is_missing() -> None:
    ignore = 'quant.ignore=[lm_head, "re:.*mlp[.]gate$"]'
    code, findings = examine_big("Qwen3-30B-A3B", 8, 2, ignore, "rollout.gpu_memory_utilization=0.2")
    assert code == 1
    assert [f["what"] for f in findings if f["status"] == "error" and f["topic"] == "backend"] == [
        "mixture of experts: quantized experts are not built yet (128 experts in 48 of 48 layers)"
    ]
    assert said(findings, "error", "layer sizes") == said(findings, "error", "ignore list") == []
    assert "divides the inputs of all 18624 quantized layers" in "".join(said(findings, "ok", "layer sizes"))
    assert "48 routers stay BF16" in said(findings, "ok", "ignore list")
    assert any("30.53 billion" in what for what in said(findings, "ok", "model"))
    _, findings = examine_big("Qwen3-30B-A3B", 8, 2)
    assert said(findings, "error", "ignore list") == ["vLLM would quantize 48 routers, which the trainer keeps in BF16"]
    # 30.5e9 parameters at 16 bytes over 8 GPUs are 57 GiB a GPU before anything else; over 16 there is room.
    _, findings = examine_big("Qwen3-30B-A3B", 8, 2, "rollout.gpu_memory_utilization=0.2")
    assert len(said(findings, "error", "memory")) == 1
    _, findings = examine_big("Qwen3-30B-A3B", 16, 2, "rollout.gpu_memory_utilization=0.3")
    assert said(findings, "error", "memory") == []
    _, findings = examine_big("Qwen3-30B-A3B", 8, 2, "optim.name=muon")
    assert "optim.name=muon is not built for 8 ranks" in said(findings, "error", "backend")


@pytest.mark.parametrize(
    ("name", "gpus", "parallel", "arguments", "errors"),
    [
        # 4736 inputs of down_proj and 896 of o_proj a GPU are 37 and 7 groups of 128; 2368 and 448 are not.
        ("Qwen2.5-Math-7B", 4, 4, [], []),
        ("Qwen2.5-Math-7B", 8, 8, ["quant.group_size=64"], ["28 attention heads do not split"]),
        (
            "Qwen2.5-Math-7B",
            8,
            8,
            [],
            ["28 attention heads do not split", "56 layers cannot be split along their inputs"],
        ),
        # 192 inputs of an expert a GPU are no whole groups of 128; of 64 they are.
        ("Qwen3-30B-A3B", 8, 4, [], ["6144 layers cannot be split along their inputs"]),
        ("Qwen3-30B-A3B", 8, 4, ["quant.group_size=64"], []),
        ("Qwen3-8B", 6, 3, [], ["32 attention heads", "8 key-value heads", "vocabulary of 151936", "a width of 4096"]),
        ("Qwen3-8B", 16, 16, [], []),  # each of 8 kv heads on two GPUs
        ("Qwen3-8B", 8, 8, ["quant.scheme=w8a8"], []),
    ],
)
def test_tensor_parallel_sizes(name: str, gpus: int, parallel: int, arguments: list[str], errors: list[str]) -> None:
    prompts = ["data.train_batch_size=48", "actor.ppo_mini_batch_size=48"]
    _, findings = examine_big(name, gpus, parallel, *arguments, *prompts)
    found = [f for f in findings if f["status"] == "error" and f["topic"] == "layer sizes"]
    if len(errors) < 4:
        assert len(found) == len(errors), found
    for words in errors[:3]:
        assert any(words in f["what"] for f in found), (words, found)
    assert all("sizes that work here: 1, 2" in f["fix"] for f in found)


def test_the_rules_of_sharding_are_vllms() -> None:
    configure_vllm_process()
    from vllm.model_executor.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE

    assert VOCABULARY_PADDING == DEFAULT_VOCAB_PADDING_SIZE


def test_ranks_that_verl_refuses() -> None:
    uneven = ["data.train_batch_size=5", "actor.ppo_mini_batch_size=5", "rollout.n=2"]
    _, findings = examine_big("Qwen2.5-Math-1.5B", 8, 1, *uneven)
    errors = said(findings, "error", "backend")
    assert any("data.train_batch_size * rollout.n = 10 responses do not split over" in error for error in errors)
    assert any("actor.ppo_mini_batch_size * rollout.n = 10" in error for error in errors)
    _, findings = examine_big("Qwen2.5-Math-1.5B", 6, 4, "data.train_batch_size=48", "actor.ppo_mini_batch_size=48")
    assert any("6 ranks do not split into rollout engines of 4" in error for error in said(findings, "error"))
    micro = "actor.ppo_micro_batch_size_per_gpu=128"
    _, findings = examine_big("Qwen2.5-Math-1.5B", 8, 1, micro)
    assert said(findings, "error", "backend") == [
        "the 64 responses of a rank's mini-batch do not split into micro-batches of 128"
    ]


def test_kept_sets_that_do_not_fit() -> None:
    findings = topic_of("kernels", "rollout.top_p=0.9")
    assert [finding.status for finding in findings[-1:]] == ["ok"] and "top_p 0.9" in findings[-1].what
    config = load_config(["config=run.yaml", "rollout.top_p=0.9"])
    context = Context(config, this_machine())
    context.hf_config.load().vocab_size = 2**40
    topic = Topic("kernels")
    with pytest.raises(UserError, match="GiB, and 4 are allowed"):
        kernels.check_sampling(context, topic)


def test_memory_of_the_gpu_decides() -> None:
    _, findings = examine_big("Qwen2.5-Math-7B", 8, 2, "doctor.gpu_memory_gib=24")
    (error,) = [f for f in findings if f["status"] == "error"]
    assert error["topic"] == "memory"
    assert "of 24.0 GiB" in error["what"]
    assert error["lines"][-1].startswith("together")
    _, findings = examine_big("Qwen2.5-Math-7B", 8, 2, "rollout.gpu_memory_utilization=0.04")
    assert any("KV cache holds 0 tokens" in what for what in said(findings, "error", "memory"))
    code = main(["config=run.yaml", "doctor.gpu_memory_gib=0.5", "doctor.json=findings.json"])
    assert code == 1
    findings = json.loads(Path("findings.json").read_text())["findings"]
    assert any("GiB at most" in what for what in said(findings, "error", "memory"))


def test_what_a_gpu_cannot_compute() -> None:
    _, findings = examine_big("Qwen3-8B", 8, 2, "quant.scheme=fp8", "doctor.gpu_capability=8.0")
    (error,) = [f for f in findings if f["status"] == "error"]
    assert "8.0 is too low for quant.scheme=fp8" in error["what"]
    assert "without a word" in error["why"]
    _, findings = examine_big("Qwen3-8B", 8, 2, "quant.scheme=fp8")
    assert said(findings, "error") == []
    _, findings = examine_big("Qwen3-8B", 8, 2, "quant.scheme=w4a8")
    assert said(findings, "error", "machine") == ["w4a8 rollouts are refused"]


def test_broken_files_are_errors_for_another_machine_too() -> None:
    cut_the_weights()
    write_rows("train.jsonl", [row(ground_truth=None)])
    code, findings = examine("doctor.device=h100")
    assert code == 1
    assert any("cannot read the weights" in what for what in said(findings, "error", "model"))
    assert any("ground_truth" in what for what in said(findings, "error", "data"))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("doctor.device=tpu", "doctor.device=tpu is not known"),
        ("doctor.gpu_memory_gib=much", "not a number above 0"),
        ("doctor.gpu_memory_gib=1e308", "not a number above 0 and below a million"),
        ("doctor.gpu_capability=1e308", "not a number above 0 and below a million"),
        ("doctor.json=a\0b", "cannot be written"),
        ("doctor.gpu_capability=-1", "not a number above 0"),
        ("doctor.gpu=h100", "cannot use"),
        ("doctor.json=", "cannot use"),
    ],
)
def test_options_of_the_doctor_itself(capsys: pytest.CaptureFixture[str], argument: str, words: str) -> None:
    assert main(["config=run.yaml", argument]) == 2
    assert words in capsys.readouterr().err


def test_findings_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config=run.yaml", "doctor.json=/proc/x/y.json"]) == 2
    assert "doctor.json=/proc/x/y.json cannot be written" in capsys.readouterr().err
    os.mkfifo("pipe")
    assert main(["config=run.yaml", "doctor.json=pipe"]) == 2
    assert "not a file" in capsys.readouterr().err
    assert Path("pipe").is_fifo()


def test_targets() -> None:
    assert find_target({}) == this_machine()
    assert find_target({"json": "x"}).here
    h100 = find_target({"device": "H100", "gpu_memory_gib": "80"})
    assert (h100.device, h100.here, h100.capability, h100.gpu_memory_bytes) == ("cuda", False, 90, 80 * 2**30)
    unnamed = find_target({"gpu_memory_gib": "48"})
    assert (unnamed.capability, unnamed.gpu_memory_bytes) == (None, 48 * 2**30)
    assert all(find_target({"device": name}).gpu_memory_bytes for name in GPUS)


# Machine, packages, disk, bands.


CORES = str(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("given", "arguments", "status", "words"),
    [
        ("4096", [], "warning", "4096 threads (OMP_NUM_THREADS)"),
        ("1", ["trainer.num_threads=4096"], "warning", "4096 threads (trainer.num_threads)"),
        ("all", [], "note", "OMP_NUM_THREADS=all is not a number"),
        ("1,2", [], "ok", "1 thread (OMP_NUM_THREADS)"),
        (None, [], "ok", "(all cores)"),
        ("4096", ["backend=verl", "trainer.n_gpus_per_node=2"], "warning", "4096 threads (OMP_NUM_THREADS) in each of"),
        (None, ["backend=verl", "trainer.n_gpus_per_node=2"], "ok", "(a worker's share of the cores) in each of 2"),
        (CORES, [], "ok", f"{CORES} thread"),
        (CORES, ["backend=verl", "trainer.n_gpus_per_node=2"], "warning", f"{CORES} thread"),
    ],
)
def test_threads(given: str | None, arguments: list[str], status: str, words: str) -> None:
    found = topic_of("machine", *arguments, threads=given)
    assert any(finding.status == status and words in finding.what for finding in found), found


PACKAGE_FAULTS = {
    "CUDA build": ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, "error", "torchvision 0.28.0 is a CUDA build"),
    "both CUDA": ({"torch": "2.13.0", "torchvision": "0.28.0"}, "note", "not the versions of"),
    "too old": ({"torch": "2.10.0"}, "warning", "torch>=2.11 is supported"),
    "missing": ({"pydantic": None}, "error", "pydantic is not installed"),
    "untested": ({"transformers": "5.99.0"}, "note", "transformers 5.99.0 (tested: "),
    "another vLLM": ({"vllm-cpu": "0.32.0"}, "warning", "vllm-cpu 0.32.0 is installed"),
}


@pytest.mark.parametrize(("versions", "status", "words"), PACKAGE_FAULTS.values(), ids=PACKAGE_FAULTS)
def test_packages(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], status: str, words: str) -> None:
    real = packages.installed
    monkeypatch.setattr(packages, "installed", lambda name: versions[name] if name in versions else real(name))
    found = topic_of("packages", target=Target("cpu", "this machine", True))
    assert any(finding.status == status and words in finding.what for finding in found), found
    if status != "error":
        assert not any(finding.status == "error" for finding in found)


def test_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    sizes = checkpoint_bytes(
        ModelSize.from_config(json.loads(Path("model/config.json").read_text())), load_config(["config=run.yaml"])
    )
    keep = ["trainer.save_freq=1", "trainer.total_training_steps=9", "trainer.max_ckpt_to_keep=2"]
    for arguments, needed in (([], sizes["export"]), (keep, sizes["export"] + 3 * sizes["resumable"])):
        for free, status in ((needed - 1, "error"), (needed, "warning"), (2 * needed, "ok")):
            monkeypatch.setattr(disk.shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
            assert topic_of("disk", *arguments)[-1].status == status


LONG = "trainer.total_training_steps=9"


def start_of(*arguments: str) -> list[tuple[str, str]]:
    return [(finding.status, finding.what) for finding in topic_of("disk", LONG, *arguments)[1:-1]]


def test_where_the_run_starts_is_what_training_does() -> None:
    assert start_of() == [("ok", "the run starts fresh")]
    config = load_config(["config=run.yaml", LONG])
    interrupted_run(config, finished=True)
    before = sorted(Path("runs").rglob("*"))
    assert [status for status, _ in start_of()] == ["note"] and "holds an earlier run" in start_of()[0][1]
    assert sorted(Path("runs").rglob("*")) == before
    shutil.rmtree("runs")
    run_dir = interrupted_run(config, 2, 4)
    before = sorted(Path("runs").rglob("*"))
    assert start_of() == [("ok", f"the run resumes from step 4, {run_dir}/checkpoints/step_4")]
    ((status, what),) = start_of("trainer.resume_mode=disable")
    assert status == "note" and "will be moved" in what
    ((status, what),) = start_of("optim.lr=1e-7")
    assert status == "error" and "the config changes what is trained" in what
    assert examine(LONG, "optim.lr=1e-7")[0] == 1
    path = f"trainer.resume_from_path={run_dir}/checkpoints/step_"
    ((status, what),) = start_of("trainer.resume_mode=resume_path", f"{path}3")
    assert status == "error" and "there is no checkpoint" in what
    found = start_of("trainer.resume_mode=resume_path", f"{path}2", "name=second")
    assert found == [("ok", f"the run resumes from step 2, {run_dir}/checkpoints/step_2")]
    (run_dir / "checkpoints" / "step_4" / "state.json").write_text("{")
    assert [status for status, _ in start_of()] == ["warning", "ok"] and "from step 2" in start_of()[1][1]
    assert sorted(Path("runs").rglob("*")) == before
    with open_run(config), pytest.raises(UserError, match="another process"):
        disk.check_free(run_dir)
    assert start_of("backend=verl") == [("note", start_of("trainer.resume_mode=disable")[0][1])]


@pytest.mark.parametrize(
    ("length", "band", "status"), [(16, 3e-4, "warning"), (16, 3e-3, "ok"), (999, 3e-4, "warning"), (1000, 3e-4, "ok")]
)
def test_bands(length: int, band: float, status: str) -> None:
    keys = ("seq_clip_ratio_high", "neg_seq_clip_ratio_low", "neg_seq_clip_ratio_high")
    bands = [f"actor.{key}={band}" for key in keys]
    (finding,) = topic_of("loss", f"data.max_response_length={length}", *bands)
    assert finding.status == status
    (finding,) = topic_of("loss", "actor.positive_band=two_sided", *[f"actor.{key}=0.1" for key in keys])
    assert finding.where == "actor.seq_clip_ratio_low"


def test_tied_lm_head_and_padded_vocabulary() -> None:
    shutil.rmtree("model")
    save_random_model(Path("model"), vocab_size=200, tie=True)
    tokenizer = json.loads(Path("model/tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["t199"]
    Path("model/tokenizer.json").write_text(json.dumps(tokenizer))
    found = [(finding.status, finding.what) for finding in topic_of("model")]
    assert any(status == "ok" and what.startswith("lm_head is tied") for status, what in found)
    assert ("note", "1 of 200 ids are not in the tokenizer") in found


def test_held_out_prompts_in_the_training_data() -> None:
    write_rows("val.jsonl", [row("t3 t1")])
    assert "1 of the held-out prompts" in next(f.what for f in topic_of("data") if f.status == "warning")


def test_a_level_that_falls_back_is_said() -> None:
    found = topic_of("kernels", "quant.align=exact", target=Target("cuda", "a GPU", False, 90, 2**36))
    (finding,) = [finding for finding in found if "quant.align" in finding.what]
    assert finding.status == "warning"
    assert "exact will fall back to linears" in finding.what
    assert "not for cuda" in (finding.why or "")


def test_memory_that_is_free() -> None:
    assert memory.available_memory() == 64 * 2**30
    context = Context(load_config(["config=run.yaml"]), Target("cpu", "this machine", True))
    assert context.hf_config.load() is context.hf_config.get()
    assert CONFIG  # the run that every test here starts from


def test_families_that_are_not_aligned_are_said() -> None:
    assert not any("compared at linears alone" in finding.what for finding in topic_of("model"))
    edit_model_config(model_type="granite", architectures=["GraniteForCausalLM"])
    (finding,) = [finding for finding in topic_of("model") if "compared at linears alone" in finding.what]
    assert finding.status == "warning" and "fresh vLLM" in str(finding.why)


def test_families_that_are_refused_leave_the_other_findings() -> None:
    edit_model_config(model_type="cohere2", architectures=["Cohere2ForCausalLM"])
    findings = topic_of("model")
    (finding,) = [finding for finding in findings if finding.status == "error"]
    assert finding.what.startswith("models of the family cohere2 are refused")
    assert any(finding.what.startswith("cohere2 with") for finding in findings)
