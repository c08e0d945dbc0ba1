"""Muon and BF16 parameters in verl's FSDP2 engine, on one, two and three gloo ranks without Ray, dense and experts.

The engine's update must be that of `MuonAdamW` in one process with plain tensors, from the gradients that the engine
had. tests/optim compares that class with the muon-optimizer package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from fsdp_ranks import BANDS, OURS, QUANT, SETTINGS, make_rows, run_engine
from random_models import save_random_model
from same_bytes import same_bytes
from transformers import AutoModelForCausalLM

from qarl.optim.muon_adamw import MuonAdamW

pytest.importorskip("verl")
pytestmark = needs_w4a16_cpu  # tests/unit/optim/test_shards.py is the short form

LR = 1e-3
KINDS = [("muon", "fp32"), ("muon", "bf16"), ("adamw", "bf16")]


def job(name: str, dtype: str) -> dict[str, Any]:
    optim = OURS | {"override_optimizer_config": SETTINGS[name]}
    engine = {"model_dtype": dtype, "use_no_sync_for_gradient_accumulation": False}
    return {"quant": QUANT, "bands": BANDS, "lr": LR, "micro": 1, "optim": optim, "engine": engine}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_random_model(tmp_path_factory.mktemp("model"), request.param))


@pytest.fixture(scope="module")
def results(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[tuple[str, str], Any]]:
    """By number of ranks. The first job of each kind makes one update, and the second saves, continues and resumes."""
    folder: Path = tmp_path_factory.mktemp("engine")
    by_world = {}
    for world in (1, 2):
        jobs = {kind: job(*kind) for kind in KINDS}
        jobs["resumed"] = job("muon", "bf16") | {"checkpoint": str(folder / f"checkpoint{world}")}
        by_world[world] = dict(
            zip(
                jobs,
                run_engine(folder, world, model, make_rows(model), list(jobs.values())),
                strict=True,
            )
        )
    return by_world


def updated(
    model: str, name: str, dtype: str, gradients: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The parameters after one update of whole tensors in this process."""
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    parameters = dict(AutoModelForCausalLM.from_pretrained(model, dtype=kind).named_parameters())
    optimizer = MuonAdamW(
        parameters.items(), lr=LR, weight_decay=OURS["weight_decay"], **SETTINGS[name]
    )
    for key, parameter in parameters.items():
        parameter.grad_dtype = None
        parameter.grad = gradients[key].clone()
    optimizer.step()
    return {key: parameter.detach() for key, parameter in parameters.items()}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_the_update_is_that_of_one_process(
    results: Any, model: str, kind: tuple[str, str], world: int
) -> None:
    """Bit for bit. The gradients are FP32 sums over micro-batches of one response."""
    outcome = results[world][kind]
    assert {gradient.dtype for gradient in outcome["gradients"].values()} == {torch.float32}
    assert outcome["state_dtypes"] == {"torch.float32"}
    expected = updated(model, *kind, outcome["gradients"])
    assert outcome["masters"].keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bytes(outcome["masters"][name], tensor), name


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_continues_bit_for_bit(results: Any, world: int) -> None:
    """`changed`: one more update after the save. After the load the same update gives the same tensors."""
    outcome = results[world]["resumed"]
    loaded, again, _ = outcome["parts"]["model_extra"]["tensors"]
    assert all(same_bytes(loaded[name], tensor) for name, tensor in outcome["loaded"].items())
    assert any(
        not same_bytes(outcome["changed"][name], tensor)
        for name, tensor in outcome["loaded"].items()
    )
    for name, tensor in outcome["changed"].items():
        assert same_bytes(again[name], tensor), name


def test_the_rates_are_reported(results: Any) -> None:
    (metrics,) = results[2]["muon", "fp32"]["metrics"]
    assert metrics["muon_lr"] == [2e-3]
    (metrics,) = results[2]["adamw", "bf16"]["metrics"]
    assert "muon_lr" not in metrics
