"""The parts of scripts/gpu_check.py in their order: commands on a GPU and in the rehearsal on a CPU, and limits."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """`seconds`: the most that it may take. `gpu`, `cpu`: arguments of Python, or of a shell for `train`; None if the
    part cannot run there. `needs`: packages without which it is skipped. {folder} and {report} are filled in."""

    name: str
    seconds: int
    gpu: str
    cpu: str | None
    needs: tuple[str, ...] = ()


_PYTEST = "-m pytest -q -rPs -p no:cacheprovider -o addopts= "
_TESTED = ("compressed_tensors", "pydantic", "pytest", "yaml")
_TRAINED = ("compressed_tensors", "pydantic", "transformers", "vllm", "yaml")
_STEPS = "-m qarl.bench steps json={report} launches=1 model=Qwen3-0.6B prompts=8 n=8 prompt_length=128 "


def training(scheme: str, level: str, eager: bool, kernels: str = "engine") -> str:
    """Two steps of the quickstart from a model that is hardly trained: two publishes, and log-probs compared."""
    files = " ".join(
        f"data.{name}_files={{folder}}/data/{file}.parquet" for name, file in (("train", "train"), ("val", "test"))
    )
    return (
        f"-m qarl.train config=quickstart.yaml output_dir={{folder}} name=run model.path={{folder}}/model {files} "
        f"quant.scheme={scheme} quant.align={level} quant.kernels={kernels} rollout.enforce_eager={str(eager).lower()} "
        "trainer.total_training_steps=2 trainer.val_before_train=false trainer.test_freq=-1"
    )


def trained(
    name: str, scheme: str, level: str, *, eager: bool, seconds: int, on_cpu: bool = False, kernels: str = "engine"
) -> Part:
    command = training(scheme, level, eager, kernels)
    return Part(name, seconds, command, command if on_cpu else None, _TRAINED)


FIRST = (
    Part("environment", 45, "scripts/gpu_check.py --facts", "scripts/gpu_check.py --facts --cpu"),
    Part(
        "operators", 150,
        f"{_PYTEST} tests/gpu/test_first_cuda.py tests/gpu/test_align_cuda.py tests/gpu/test_vllm_kernels_cuda.py "
        "tests/gpu/test_trainer_cuda.py tests/gpu/test_publish_cuda.py",
        f"{_PYTEST} tests/gpu/test_first_cuda.py", _TESTED,
    ),
    trained("eager", "w4a16", "linears", eager=True, seconds=90, on_cpu=True),
    trained("graphs", "w4a16", "linears", eager=False, seconds=110),
    trained("graphs_w8a8_model", "w8a8", "model", eager=False, seconds=110),
    Part(
        "bench", 120,
        "-m qarl.bench kernels model=Qwen3-8B layer=gate_up,down m=1,16,512,4096,16384 seconds=0.1 device=cuda "
        "json={report}",
        "-m qarl.bench kernels shape=64x128 m=1,17 seconds=0.02 device=cpu json={report}",
    ),
    Part(
        "tuning", 60, "scripts/tune_triton.py --operations w4a16 --minutes 0.7 --output {report}",
        "scripts/tune_triton.py --operations w4a16 --dry-run",
    ),
    Part(
        "steps", 150, f"{_STEPS} response_length=256 schemes=w4a16 levels=linears,model rounds=3 warmup=1 device=cuda",
        None, _TRAINED,
    ),
)  # fmt: skip
"""In the order of what is most likely to break. Nothing behind `eager` says anything if `eager` fails."""
SECOND = (
    *(trained(f"{scheme}_{level}", scheme, level, eager=False, seconds=110)
      for scheme, level in (("w8a8", "linears"), ("fp8", "linears"), ("fp8", "model"), ("w4a16", "model"),
                            ("w4a16", "off"), ("bf16", "off"), ("bf16", "model"))),
    *(trained(f"{scheme}_qarl", scheme, "model", eager=False, seconds=110, kernels="qarl")
      for scheme in ("w4a16", "fp8", "w8a8")),
    Part("verl", 300, f"{training('w4a16', 'linears', False)} backend=verl", None, (*_TRAINED, "verl", "ray")),
    Part("experts", 150, f"{_PYTEST} tests/gpu/test_experts_cuda.py", None, _TESTED),
    Part("triton", 250, f"{_PYTEST} tests/kernels/triton_kernels",
         f"{_PYTEST} tests/kernels/triton_kernels/test_compat.py", _TESTED),
    Part("all_steps", 400, f"{_STEPS} response_length=256 levels=off,linears,model rounds=1 warmup=1 device=cuda",
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
        "operation=grouped_linear,grouped_input_gradient,experts",
        "-m qarl.bench kernels experts=8,2,256,128 m=3 seconds=0.02 rounds=1 device=cpu json={report}",
    ),
)  # fmt: skip
PARTS = {part.name: part for part in (*FIRST, *SECOND)}
GROUPS = {"first": FIRST, "second": SECOND, "all": (*FIRST, *SECOND)}
TRAINING = {
    "w4a16": ("eager", "graphs", "w4a16_model", "w4a16_off", "w4a16_qarl"),
    "w8a8": ("graphs_w8a8_model", "w8a8_linears", "w8a8_qarl"),
    "fp8": ("fp8_linears", "fp8_model", "fp8_qarl"),
    "bf16": ("bf16_off", "bf16_model"),
}
"""Scheme -> the parts that train with it."""
