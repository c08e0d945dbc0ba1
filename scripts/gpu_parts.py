"""The parts of scripts/gpu_check.py in their order: commands on a GPU and in the rehearsal on a CPU, and limits."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Mapping
from typing import Any, NamedTuple

FIRST_CALL = 3
"""How many times its seconds a part may take: the first call compiles and captures everything."""


class Part(NamedTuple):
    """`seconds`: the most that it takes on a warm machine. `gpu`, `cpu`: arguments of Python; None if the part cannot
    run there. `needs`: packages without which it is skipped. {folder} is empty at the start of each call, {scratch}
    stays, {output} is the folder of the results, {report} a file for the part's own JSON, and {gpus} their number."""

    name: str
    seconds: int
    gpu: str
    cpu: str | None
    needs: tuple[str, ...] = ()


SCHEMES = ("w4a16", "w8a8", "fp8", "bf16")
_PYTEST = "-m pytest -v -rPsfE --tb=short -p no:cacheprovider -o addopts= "
_TESTED = ("compressed_tensors", "pydantic", "pytest", "yaml")
_TRAINED = ("compressed_tensors", "pydantic", "transformers", "vllm", "yaml")
_VERL = (*_TRAINED, "verl", "ray")
_STEPS = (
    "-m qarl.bench steps json={report} launches=1 model=Qwen3-0.6B prompts=8 n=8 prompt_length=128 "
)
_TINY = "scripts/make_tiny_model.py --steps 5 --data {folder}/data --output {folder}/"
WIDE = "Qwen3-8B-4-layers"
"""Heads of 128 and rows of 4,096 elements: what a model of 8B has, in a time that a check has."""
BEFORE = {
    "{folder}/model": f"{_TINY}model",
    "{folder}/experts": f"{_TINY}experts --experts 8",
    "{scratch}/Qwen3-0.6B": "scripts/random_model.py --model Qwen3-0.6B --output {scratch}/Qwen3-0.6B",
    f"{{scratch}}/{WIDE}": f"scripts/random_model.py --model Qwen3-8B --layers 4 --output {{scratch}}/{WIDE}",
}
"""What a part's command names -> what makes it. Each of them does nothing if it is there already."""


def nvidia(*arguments: str) -> str:
    """Return what nvidia-smi prints, or "" without it."""
    with contextlib.suppress(OSError):
        return subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, check=False
        ).stdout.strip()
    return ""


def gpus() -> int:
    """Return the number of GPUs of this machine, or 1 if the driver does not say."""
    return max(1, sum(line.startswith("GPU ") for line in nvidia("-L").splitlines()))


def arguments(**values: object) -> str:
    """Return KEY=VALUE for a shell. `__` stands for the dot of a key."""
    texts = {key.replace("__", "."): str(value) for key, value in values.items()}
    return " ".join(
        f"{key}={text if '{' in text else shlex.quote(text)}" for key, text in texts.items()
    )


def ending(steps: int) -> str:
    """Return the arguments of a run that trains `steps` steps and evaluates nothing."""
    never = {"trainer__val_before_train": "false", "trainer__test_freq": -1}
    return arguments(trainer__total_training_steps=steps, **never)


def training(
    scheme: str,
    level: str,
    eager: bool,
    kernels: str = "engine",
    model: str = "model",
    config: str = "quickstart.yaml",
    steps: int = 2,
) -> str:
    """Steps of the quickstart from a model that is hardly trained: at least two publishes, and log-probs compared."""
    data = "{folder}/data/train.parquet"
    return f"-m qarl.train config={config} " + " ".join((
        arguments(output_dir="{folder}", name="run", model__path=f"{{folder}}/{model}", data__train_files=data),
        arguments(data__val_files="{folder}/data/test.parquet", quant__scheme=scheme, quant__align=level),
        arguments(quant__kernels=kernels, rollout__enforce_eager=str(eager).lower()),
        ending(steps),
    ))  # fmt: skip


def shaped(
    name: str, steps: int, values: Mapping[str, object], config: str = "quickstart.yaml"
) -> str:
    """Arguments of `qarl train` for a public shape with random weights (scripts/random_model.py)."""
    folder = f"{{scratch}}/{name}"
    return f"config={config} " + " ".join((
        arguments(output_dir="{folder}", name="run", model__path=f"{folder}/model"),
        arguments(data__train_files=f"{folder}/prompts.jsonl", data__val_files="[]", data__max_prompt_length=64),
        arguments(reward__function="scripts/random_model.py:reward", **values),
        arguments(trainer__save_freq=-1, trainer__save_final="false"), ending(steps),
    ))  # fmt: skip


def small(steps: int, scheme: str, model: str = "Qwen3-0.6B", **values: object) -> str:
    """`shaped` for a model of `BEFORE`: 64 responses of 256 tokens a step."""
    defaults: dict[str, object] = {
        "data__train_batch_size": 8,
        "data__max_response_length": 256,
        "actor__ppo_mini_batch_size": 8,
        "actor__ppo_micro_batch_size_per_gpu": 16,
        "actor__log_prob_micro_batch_size_per_gpu": 16,
        "quant__scheme": scheme,
        "quant__align": "linears",
        "quant__group_size": 128,
    }
    return shaped(model, steps, defaults | values)


def large(steps: int, prompts: int, response: int, tokens: int) -> str:
    """`shaped` for the 30B by its own config on all GPUs."""
    values = {"data__train_batch_size": prompts, "data__max_response_length": response,
              "actor__ppo_mini_batch_size": min(prompts, 64), "actor__ppo_max_token_len_per_gpu": tokens,
              "trainer__n_gpus_per_node": "{gpus}", "trainer__logger": "[console]"}  # fmt: skip
    return "-m qarl.train " + shaped("Qwen3-30B-A3B", steps, values, "qwen3_30b_w4a16.yaml")


def trained(
    name: str,
    scheme: str,
    level: str,
    *,
    eager: bool,
    seconds: int,
    on_cpu: bool = False,
    kernels: str = "engine",
) -> Part:
    command = training(scheme, level, eager, kernels)
    return Part(name, seconds, command, command if on_cpu else None, _TRAINED)


def exact(prefix: str, model: str, scheme: str, seconds: int, kernels: str = "engine") -> Part:
    """Two steps at `model`, whose largest δ is what is asked. The rehearsal trains the tiny model."""
    run = small(2, scheme, model, quant__align="model", quant__kernels=kernels)
    gpu = f"-m qarl.train {run}"
    cpu = training(scheme, "model", True)
    name = f"{prefix}_{scheme}" if kernels == "engine" else f"{prefix}_{scheme}_{kernels}"
    return Part(name, seconds, gpu, cpu, _TRAINED)


_OPERATORS = (
    "tests/gpu/test_first_cuda.py tests/gpu/test_align_cuda.py tests/gpu/test_vllm_kernels_cuda.py "
    "tests/gpu/test_trainer_cuda.py tests/gpu/test_publish_cuda.py tests/gpu/test_experts_cuda.py"
)
_MACHETE = (
    "tests/gpu/test_vllm_kernels_cuda.py::"
    "test_machete_without_splits_gives_a_row_the_same_bits_with_any_number_of_rows"
)
_PROFILE = "scripts/profile_step.py --trace {output}/profile.json "
_EXPERTS = training("w4a16", "linears", False, model="experts", config="quickstart_moe.yaml")
_EXPERTS_ON_CPU = training("w4a16", "linears", True, model="experts", config="quickstart_moe.yaml")
_LORA = {
    scheme: training(scheme, "model", False, config="quickstart_lora.yaml") for scheme in SCHEMES
}
_ON_TWO: dict[str, Any] = {"backend": "verl", "trainer__n_gpus_per_node": 2}
_VERL_W8A8 = f"{training('w8a8', 'model', False)} backend=verl"
_VERL_ON_CPU = f"{training('w8a8', 'model', True)} backend=verl trainer.n_gpus_per_node=1"
FIRST = (
    Part("environment", 20, "scripts/gpu_facts.py", "scripts/gpu_facts.py --cpu"),
    Part("probe", 90, "scripts/gpu_probe.py --seconds 80", "scripts/gpu_probe.py --cpu --seconds 20"),
    Part(
        "tuning", 60, "scripts/tune_triton.py --operations w4a16_invariant --minutes 0.7 --output {output}/tiles.json",
        "scripts/tune_triton.py --operations w4a16_invariant --dry-run",
    ),
    Part("contracts", 120, f"{_PYTEST} tests/gpu/test_align_cuda.py {_MACHETE}", f"{_PYTEST} {_MACHETE}", _TRAINED),
    exact("model", "Qwen3-0.6B", "bf16", 90),
    exact("model", "Qwen3-0.6B", "w8a8", 60),
    exact("model", "Qwen3-0.6B", "fp8", 60),
    exact("model", "Qwen3-0.6B", "w4a16", 60, "machete"),
    *(exact("wide", WIDE, scheme, 70, kernels)
      for scheme, kernels in (("w8a8", "engine"), ("fp8", "engine"), ("w4a16", "machete"), ("bf16", "engine"))),
    Part("verl", 170, _VERL_W8A8, _VERL_ON_CPU, _VERL),
    Part("experts_verl", 170, f"{_EXPERTS} backend=verl", f"{_EXPERTS_ON_CPU} backend=verl", _VERL),
    Part("second_engine", 60, f"{_PYTEST} tests/gpu/test_engine_cuda.py", f"{_PYTEST} tests/gpu/test_engine_cuda.py",
         _TESTED),
    Part("hundred", 130, training("w8a8", "model", False, steps=100), training("w8a8", "model", True, steps=3),
         _TRAINED),
)  # fmt: skip
"""What decides most comes first. The first three need no vLLM, and the probe only one of its libraries."""
SECOND = (
    Part("compile", 40, f"{_PYTEST} tests/gpu/test_first_cuda.py -k test_plane",
         f"{_PYTEST} tests/gpu/test_first_cuda.py -k test_plane", _TESTED),
    trained("eager", "w4a16", "linears", eager=True, seconds=90, on_cpu=True),
    trained("graphs", "w4a16", "linears", eager=False, seconds=110),
    *(Part(f"shape_{scheme}", 110, f"-m qarl.train {small(5, scheme)}", None, _TRAINED)
      for scheme in ("w4a16", "w8a8", "fp8")),
    Part("profile", 110, f"{_PROFILE}{small(3, 'w4a16')}", None, _TRAINED),
    Part("experts_local", 110, _EXPERTS, None, _TRAINED),
    Part("lora", 110, _LORA["w4a16"], None, _TRAINED),
    Part("operators", 170, f"{_PYTEST} {_OPERATORS}", f"{_PYTEST} tests/gpu/test_first_cuda.py", _TESTED),
    trained("graphs_w8a8_model", "w8a8", "model", eager=False, seconds=110),
    Part(
        "bench", 120,
        "-m qarl.bench kernels model=Qwen3-8B layer=gate_up,down m=1,16,512,4096,16384 seconds=0.1 device=cuda "
        "json={report}",
        "-m qarl.bench kernels shape=64x128 m=1,17 seconds=0.02 device=cpu json={report}",
    ),
    Part(
        "all_tiles", 170, "scripts/tune_triton.py --minutes 2.5 --output {output}/all_tiles.json",
        "scripts/tune_triton.py --dry-run",
    ),
    Part(
        "steps", 150, f"{_STEPS} response_length=256 schemes=w4a16 levels=linears,model rounds=3 warmup=1 device=cuda",
        None, _TRAINED,
    ),
    *(trained(f"{scheme}_{level}", scheme, level, eager=False, seconds=110)
      for scheme, level in (("w8a8", "linears"), ("fp8", "linears"), ("fp8", "model"), ("w4a16", "model"),
                            ("w4a16", "off"), ("bf16", "off"), ("bf16", "model"))),
    *(trained(f"{scheme}_qarl", scheme, "model", eager=False, seconds=110, kernels="qarl")
      for scheme in ("w4a16", "fp8", "w8a8")),
    *(Part(f"lora_{scheme}", 110, _LORA[scheme], None, _TRAINED) for scheme in SCHEMES[1:]),
    Part("verl_w4a16", 170, f"{training('w4a16', 'linears', False)} backend=verl", None, _VERL),
    Part("lora_verl", 170, f"{_LORA['w4a16']} backend=verl", None, _VERL),
    Part("triton", 170, f"{_PYTEST} tests/integration/kernels/triton_kernels",
         f"{_PYTEST} tests/integration/kernels/triton_kernels/test_compat.py", _TESTED),
    Part("all_steps", 170, f"{_STEPS} response_length=256 levels=off,linears,model rounds=1 warmup=1 device=cuda",
         None, _TRAINED),
    Part(
        "trainer", 150,
        "-m qarl.bench trainer model=Qwen3-0.6B layers=8 levels=linears launches=1 rounds=3 prompts=8 n=8 "
        "prompt_length=256 response_length=512 micro_batch=16 device=cuda json={report}",
        "-m qarl.bench trainer layers=1 schemes=w8a8 levels=linears launches=1 prompts=2 response_length=4 device=cpu "
        "json={report}", _TRAINED[:-2],
    ),
    Part("publish", 120, "-m qarl.bench publish model=Qwen3-0.6B launches=1 device=cuda json={report}", None, _TRAINED),
    Part(
        "bench_experts", 80,
        "-m qarl.bench kernels model=Qwen3-30B-A3B m=16,4096 seconds=0.05 device=cuda json={report} "
        "operation=experts",
        "-m qarl.bench kernels experts=8,2,256,128 m=3 seconds=0.02 rounds=1 device=cpu json={report}",
    ),
)  # fmt: skip
SEVERAL = (
    Part("gather", 120, f"{_PYTEST} tests/gpu/test_several_cuda.py -k gather", None, _TESTED),
    Part("between", 60, f"{_PYTEST} tests/gpu/test_several_cuda.py -k between", None, _TESTED),
    Part("ranks", 170, f"-m qarl.train {small(2, 'w4a16', **_ON_TWO)}", None, _VERL),
    Part("tensor_parallel", 170,
         f"-m qarl.train {small(2, 'w4a16', rollout__tensor_model_parallel_size=2, **_ON_TWO)}", None, _VERL),
    Part("make_30b", 170, "scripts/random_model.py --model Qwen3-30B-A3B --output {scratch}/Qwen3-30B-A3B", None,
         _TRAINED),
    Part("short_30b", 170, large(2, prompts=64, response=2048, tokens=8192), None, _VERL),
    Part("whole_30b", 170, large(1, prompts=32, response=16384, tokens=22528), None, _VERL),
)  # fmt: skip
"""For 2 to 8 GPUs. The 30B needs 8 of 80 GB, 64 GB of disk for its weights, and nothing that is downloaded."""
PARTS = {part.name: part for part in (*FIRST, *SECOND, *SEVERAL)}
GROUPS = {"first": FIRST, "second": SECOND, "several": SEVERAL, "all": (*FIRST, *SECOND)}
