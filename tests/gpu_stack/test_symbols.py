"""Every name of another package that qarl's sources use exists in the GPU lock, and takes the arguments it is given.

The list is read from the sources (tests/support/third_party_uses.py), so a new use is tested without being added here.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from gpu_lock import pretend, required
from third_party_uses import Use, overrides, package_uses, resolve, why_not_callable

required()

NOT_LOCKED = {
    "trl": "has a lock of its own",
    "gguf": "is in the lock of SmolLM2",
    "wandb": "is optional",
    "lm_eval": "is optional",
}
CPU_ONLY = (
    "torch.ops._C.convert_weight_packed",
    "torch.ops._C.cpu_gemm_wna16",
    "torch.ops._C.int8_scaled_mm_with_quant",
    "torch.ops._C.onednn_scaled_mm",
    "torch.ops._C.weight_packed_linear",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts",
)
"""Of vLLM for CPUs. On a GPU no code that names them runs."""
NEWER_VLLM = (
    "vllm.distributed.weight_transfer.base.ParamMeta",
    "vllm.distributed.weight_transfer.base.TrainerInitInfo",
    "vllm.distributed.weight_transfer.base.TrainerWeightTransferEngine",
    "vllm.distributed.weight_transfer.base.WeightSource",
    "vllm.distributed.weight_transfer.factory.WeightTransferTrainerFactory",
)
"""Of the transfer engine `qarl`, which needs vLLM 0.29: `register` leaves it out."""
SIGNATURE_IN_NEW = (
    "tokenizers.Tokenizer",
    "transformers.AutoModelForCausalLM.from_config",
)
"""Their real signatures are not those that Python reports."""

USES = [
    use
    for use in package_uses()
    if use.package not in NOT_LOCKED
    and not use.target.startswith("torch.ops.qarl.")  # QaRL's own operator
]
NAMES = sorted({use.target for use in USES if not use.target.startswith(CPU_ONLY + NEWER_VLLM)})
CALLS = sorted(
    {(use.target, use.call): use for use in USES if use.call and use.target in NAMES}.values(),
    key=lambda use: (use.file, use.line, use.target),
)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(Path(sys.prefix) / "libcuda_stub"))
    pretend(monkeypatch, (9, 0))


@pytest.mark.parametrize("name", NAMES)
def test_the_name_exists(name: str) -> None:
    resolve(name)


@pytest.mark.parametrize("use", CALLS, ids=lambda use: f"{use.file}:{use.line}:{use.target}")
def test_the_arguments_are_taken(use: Use) -> None:
    assert use.call is not None
    assert use.target in SIGNATURE_IN_NEW or why_not_callable(resolve(use.target), use.call) is None


PLUGIN = ROOT / "qarl" / "verl"
PLUGINS = sorted(
    path.stem
    for path in PLUGIN.glob("*.py")
    if path.stem not in ("__init__", "cpu_platform", "entry_point")
)


@pytest.mark.parametrize("module", PLUGINS)
def test_what_the_verl_plugin_replaces_is_there_to_be_replaced(module: str) -> None:
    """A method that overrides one of verl's (or vLLM's) takes every argument that its caller gives."""
    loaded = importlib.import_module(f"qarl.verl.{module}")
    classes = [
        c for c in vars(loaded).values() if inspect.isclass(c) and c.__module__ == loaded.__name__
    ]
    for kind, name, own, base in overrides(classes):
        if not inspect.isfunction(base):
            continue
        theirs = inspect.signature(base).parameters
        ours = inspect.signature(own).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in ours.values())
        lacking = [p for p in theirs if p not in ours and theirs[p].kind not in (2, 4)]
        assert takes_any or not lacking, f"{kind.__name__}.{name} does not take {lacking}"
        extra = [
            p
            for p in ours
            if p not in theirs and ours[p].default is ours[p].empty and ours[p].kind not in (2, 4)
        ]
        assert not extra, f"{kind.__name__}.{name} needs {extra}, which verl does not give"
