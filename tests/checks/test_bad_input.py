"""Bad configs, bad data and unfit machines: each is one clear error before the rollout engine starts.

Everything goes through `qarl.train.main`, as on the command line. A refusal is exit code 2 and one message on stderr
that names what is wrong and what to do; the engine must never be constructed, and nothing may be logged.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from bad_runs import (
    CONFIG_FAULTS,
    FILE_FAULTS,
    REWARD_FAULTS,
    SPLIT_GROUPS,
    EngineConstructed,
    edit_model_config,
    hide_package,
    row,
    write_rows,
)
from random_models import save_random_model
from safetensors.torch import load_file, save_file

from qarl import process
from qarl.checkpoint.run_folder import fresh_run_dir
from qarl.checks import layers, lengths, machine
from qarl.checks.model_folder import load_hf_config
from qarl.config import load_config
from qarl.errors import UserError
from qarl.process import configure_vllm_process
from qarl.train import main
from qarl.verl import run as verl

pytestmark = pytest.mark.usefixtures("startable_run")
Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Run with these overrides, insist on a proper refusal that contains `words`, and give its message."""

    def refuse(*overrides: str, words: list[str], config: str = "run.yaml") -> str:
        capsys.readouterr()
        code = main([f"config={config}", *overrides])
        printed = capsys.readouterr()
        assert code == 2
        assert "Traceback" not in printed.out + printed.err
        assert printed.err.count("error: ") == 1, printed.err
        message = printed.err[printed.err.index("error: ") :]
        assert [word for word in [*words, "fix: "] if word not in message] == [], message
        assert not list(Path().rglob("metrics.jsonl"))
        return message

    return refuse


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


# The model folder.


def test_missing_model_folder(refusal: Refusal) -> None:
    refusal("model.path=models/none", words=["models/none", "model.path"])


def test_model_without_config(refusal: Refusal) -> None:
    Path("model/config.json").unlink()
    refusal(words=["'model'", "model.path", "config.json"])


def test_model_config_that_contradicts_itself(refusal: Refusal) -> None:
    edit_model_config(num_hidden_layers=3)
    refusal(words=["'model'", "model.path", "`num_hidden_layers` (3) must be equal"])


def test_weights_of_another_size_than_the_config_says(refusal: Refusal) -> None:
    edit_model_config(intermediate_size=128)
    refusal(words=["cannot be built from its weights", "'model'", "model.path"])


def test_model_without_tokenizer(refusal: Refusal) -> None:
    for path in Path("model").glob("tokenizer*"):
        path.unlink()
    refusal(words=["no tokenizer", "'model'", "tokenizer.json"])


def test_model_without_weights(refusal: Refusal) -> None:
    Path("model/model.safetensors").unlink()
    refusal(words=["cannot be loaded", "model.path", "safetensors"])


def test_weights_that_lack_a_tensor(refusal: Refusal) -> None:
    file = Path("model/model.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    refusal(words=["lacks 1 tensors", "model.layers.1.mlp.up_proj.weight", "random numbers"])


def test_weights_cut_short(refusal: Refusal) -> None:
    path = Path("model/model.safetensors")
    path.write_bytes(path.read_bytes()[:-1000])
    refusal(words=["model/model.safetensors", "cut short"])


@pytest.mark.parametrize(("vocab_size", "why"), [(128, "masked in the rollout"), (48, "no embedding")])
def test_vocabularies_that_do_not_match(refusal: Refusal, vocab_size: int, why: str) -> None:
    edit_model_config(vocab_size=vocab_size)
    refusal(words=["64 entries", f"vocab_size is {vocab_size}", why])


def test_a_padded_vocabulary_is_no_fault() -> None:
    """Qwen's own checkpoints have 0.2% more embeddings than tokens."""
    shutil.rmtree("model")
    save_random_model(Path("model"), vocab_size=200)
    tokenizer = json.loads(Path("model/tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["t199"]
    Path("model/tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml"])


def test_tokenizer_without_chat_template(refusal: Refusal) -> None:
    Path("model/chat_template.jinja").unlink()
    refusal(words=["chat template", "model"])


def test_kv_cache_that_holds_no_sequence(refusal: Refusal) -> None:
    words = [
        "rollout.cpu_kvcache_space_gib=0.0001",
        "does not hold one sequence of 32 tokens",
        "set it to 0.001 or more",
    ]
    refusal("rollout.cpu_kvcache_space_gib=0.0001", words=words)


def test_the_kv_cache_is_counted_as_vllm_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_vllm_process()
    from vllm.v1.core.kv_cache_utils import check_enough_kv_cache_memory
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    hf_config = load_hf_config("model")
    spec = FullAttentionSpec(block_size=lengths.KV_BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    specs = {f"layer{i}": spec for i in range(2)}
    for response in (1, 112, 113, 300):
        vllm_config = fake_vllm_config(16 + response)
        for size in range(1, 6 * len(specs) * spec.page_size_bytes, 8191):
            gib = f"rollout.cpu_kvcache_space_gib={size / 2**30!r}"
            config = load_config(["config=run.yaml", f"data.max_response_length={response}", gib])
            theirs = refuses(lambda: check_enough_kv_cache_memory(vllm_config, specs, size), ValueError)  # noqa: B023  at once
            assert refuses(lambda: lengths.check_kv_cache(config, hf_config), UserError) == theirs  # noqa: B023  called at once
    monkeypatch.setattr(lengths, "runs_on_cpu", lambda backend: False)
    lengths.check_kv_cache(config, hf_config)


def fake_vllm_config(max_model_len: int) -> Any:
    """The attributes that vLLM's count of a cache reads."""
    parallel = SimpleNamespace(
        decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(block_size=lengths.KV_BLOCK, num_gpu_blocks_override=None),
    )


def test_more_tokens_than_positions(refusal: Refusal) -> None:
    words = ["data.max_prompt_length", "data.max_response_length", "1016", "512 positions"]
    refusal("data.max_response_length=1000", words=words)


@pytest.mark.parametrize("scheme", ["w4a16", "bf16"])
def test_model_that_is_already_quantized(refusal: Refusal, scheme: str) -> None:
    edit_model_config(quantization_config={"quant_method": "gptq", "bits": 4})
    refusal(f"quant.scheme={scheme}", words=["already quantized (gptq)", "BF16 master weights", "model.path"])


# Layers that the scheme or the engine cannot hold.


@pytest.mark.parametrize("align", ["linears", "off"])
def test_group_size_that_does_not_divide_the_layers(refusal: Refusal, align: str) -> None:
    words = ["quant.group_size=64", "2 of 14 layers", "model.layers.0-1.mlp.down_proj", "which is 96"]
    message = refusal("quant.group_size=64", f"quant.align={align}", words=words)
    assert "gate_proj" not in message
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", "quant.group_size=64", 'quant.ignore=[lm_head, "re:.*down_proj"]'])


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        ({"hidden_size": 64, "intermediate_size": 80}, ["model.layers.0-1.mlp.down_proj", "[64, 80]"]),
        (
            {"hidden_size": 64, "intermediate_size": 72},
            ["model.layers.0-1.mlp.gate_proj", "model.layers.0-1.mlp.up_proj", "[72, 64]"],
        ),
        ({"hidden_size": 40}, ["model.layers.0-1.self_attn.q_proj", "model.layers.0-1.self_attn.o_proj"]),
    ],
    ids=["K", "N of a fused layer", "hidden"],
)
def test_sizes_that_the_engines_kernel_refuses(refusal: Refusal, sizes: dict[str, int], layers: list[str]) -> None:
    edit_model_config(**sizes)
    words = ["multiples of 32", "quant.ignore", *layers]
    message = refusal("quant.group_size=8", words=words)
    if "intermediate_size" in sizes:
        assert "self_attn" not in message
        assert ("mlp.up_proj" in message) == ((2 * sizes["intermediate_size"]) % 32 != 0)


@pytest.mark.parametrize("missing", [["avx512_vnni"], ["avx512f", "avx512_vnni"]])
def test_cpu_without_the_kernels_instructions(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, missing: list[str]
) -> None:
    flags = {"avx2", *machine.W4A16_CPU_FLAGS} - set(missing)
    monkeypatch.setattr(machine, "cpu_flags", lambda: flags)
    refusal(words=["quant.scheme", f"lacks {' and '.join(missing)}", "quant.scheme=bf16"])
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", "quant.scheme=bf16"])
    monkeypatch.setattr(machine, "runs_on_cpu", lambda backend: False)
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml"])


def test_each_scheme_asks_for_what_it_needs(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal("quant.scheme=w4a8", words=["quant.scheme", "leave the activations in BF16", "quant.scheme=w8a8"])
    monkeypatch.setattr(layers, "W4A16_CPU_MULTIPLE", 1000)
    refusal("quant.scheme=w4a16", words=["multiples of 1000"])
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"avx512_vnni"})
    for scheme in ("w8a8", "fp8"):
        with pytest.raises(EngineConstructed):
            main(["config=run.yaml", f"quant.scheme={scheme}"])
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"avx512f"})
    refusal("quant.scheme=w8a8", words=["lacks avx512_vnni", "int8 products"])
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", "quant.scheme=fp8"])


@pytest.mark.parametrize(("ignore", "words"), SPLIT_GROUPS.values(), ids=SPLIT_GROUPS)
def test_ignore_that_the_engine_cannot_follow(refusal: Refusal, ignore: list[str], words: list[str]) -> None:
    refusal(f"quant.ignore={json.dumps(['lm_head', *ignore])}", words=["quant.ignore", *words])


def test_a_whole_fused_group_can_be_ignored() -> None:
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", 'quant.ignore=[lm_head, "re:.*self_attn[.][qkv]_proj"]'])


def refuses(check: Callable[[], Any], error: type[Exception]) -> bool:
    try:
        check()
    except error:
        return True
    return False


def test_the_checks_refuse_what_vllm_refuses() -> None:
    """Fused layers as vLLM fuses them, ignore lists it cannot follow, sizes its kernel for CPUs cannot take."""
    configure_vllm_process()
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
    from vllm.platforms import current_platform

    fused_layers = {fused: list(parts) for fused, parts in layers.FUSED_LAYERS.items()}
    for family in (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM):
        assert family.packed_modules_mapping == fused_layers

    parts = [f"model.layers.0.self_attn.{part}" for part in fused_layers["qkv_proj"]]
    for count in range(4):
        for ignore in itertools.combinations(parts, count):
            engine = functools.partial(
                should_ignore_layer, "model.layers.0.self_attn.qkv_proj", ignore, fused_mapping=fused_layers
            )
            ours = functools.partial(layers.check_fused_layers, parts, ignore)
            assert refuses(ours, UserError) == refuses(engine, ValueError), ignore

    if not current_platform.is_cpu():
        pytest.skip("vLLM's kernel for CPUs answers on a CPU only")
    import torch
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    for n, k in itertools.product((16, 32, 40, 64, 96), repeat=2):
        layer = MPLinearLayerConfig((k, n), (k, n), scalar_types.uint4b8, torch.bfloat16, 8, False, False)
        ours = functools.partial(layers.check_engine_shapes, {"down_proj": (n, k)})
        assert refuses(ours, UserError) != CPUWNA16LinearKernel.can_implement(layer)[0], (n, k)


def test_layers_are_named_by_ranges_of_their_numbers() -> None:
    names = [f"model.layers.{i}.mlp.up_proj" for i in (0, 1, 2, 5, 11, 10)] + ["score"]
    assert layers.name_layers(names) == "model.layers.0-2,5,10-11.mlp.up_proj, score"


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
        (row() | {"prompt": [{"role": "user", "content": None}]}, ["no content"]),
        (row() | {"data_source": None}, ["data_source"]),
        (row(" ".join(["t5"] * 20)), ["20 tokens", "max_prompt_length=16", "data.filter_overlong_prompts=true"]),
    ],
    ids=["no ground truth", "no messages", "no content", "no data source", "too long"],
)
def test_bad_row(refusal: Refusal, bad_row: dict[str, Any], words: list[str]) -> None:
    write_rows("train.jsonl", [row() for _ in range(5)] + [bad_row])
    refusal(words=["train.jsonl, row 5", *words])


def test_everything_filtered_out(refusal: Refusal) -> None:
    words = ["no prompt is left of 8", "train.jsonl", "raise data.max_prompt_length"]
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
    assert "runs/bad held an earlier run, which is now in runs/bad.2" in capsys.readouterr().err
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
    Path("runs/bad").mkdir(parents=True)
    Path("runs/bad/metrics.jsonl").write_text('{"step": 1}\n')
    program = (
        "import sys; from qarl.train import main; code = main(['config=run.yaml', 'dry_run=true', 'seed=7']);"
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
    assert main(["config=qwen3_30b_w4a16.yaml", "dry_run=true"]) == 2
    printed = capsys.readouterr()
    assert "name: qwen3_30b_w4a16" in printed.out and "loss_mode: tbpo" in printed.out
    assert printed.out.splitlines()[-1].startswith("# missing: optim.name has no counterpart")
    last = printed.err[printed.err.index("error: ") :]
    assert "no counterpart of optim.name" in last and last.rstrip().splitlines()[-1].startswith("  fix: ")
    assert "muon" in Path("runs/qwen3_30b_w4a16/dry_run.yaml").read_text()
    assert main(["config=qwen3_30b_w4a16.yaml", "dry_run=true", "optim.name=adamw"]) == 0


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
