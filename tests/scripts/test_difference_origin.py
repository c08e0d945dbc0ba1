"""`scripts/difference_origin.py`: the layer and the element where `model` leaves `exact`, found in a planted fault."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from checkout import ROOT
from random_models import save_random_model
from transformers import AutoModelForCausalLM

from qarl.align import cpu as attention
from qarl.kernels.cpu import layer_ops
from qarl.quant import get_scheme
from qarl.rollout.engine import RolloutBatch
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.policy import Policy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        layer_ops.attention_unavailable("cpu", 32) is not None or layer_ops.uses_tiles("cpu", 32),
        reason="needs vLLM's attention for CPUs without AMX, which level model has the bits of",
    ),
]


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        return importlib.import_module("difference_origin")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Policy]:
    folder = save_random_model(tmp_path_factory.mktemp("model"))

    def policy(level: str) -> Policy:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return Policy(model, get_scheme("bf16"), (), align=level)

    return policy("model"), policy("exact")


def two_rows() -> Batch:
    tokens = [list(range(3, 20)), list(range(20, 60))]
    rollout = RolloutBatch([[5, 6, 7]] * 2, tokens, [[-4.0] * len(row) for row in tokens], ["stop"] * 2, 0)
    return make_batch(rollout, torch.zeros(2), torch.zeros(2), pad_token_id=0)


def found(script: Any, policies: tuple[Policy, Policy], row: int) -> dict[str, Any]:
    ours, engines = (script.attention_calls(policy, two_rows(), row) for policy in policies)
    assert len(ours) == len(engines) == 2
    result: dict[str, Any] = script.parting(ours, engines)
    return result


@pytest.mark.parametrize("row", [0, 1])
def test_without_a_fault_nothing_is_found(script: Any, policies: tuple[Policy, Policy], row: int) -> None:
    assert found(script, policies, row) == {"found": "nothing"}


def test_a_planted_difference_is_found(
    script: Any, policies: tuple[Policy, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One output of the second layer, one BF16 step higher."""
    calls: list[float] = []
    place, right = (0, 30, 1, 5), attention.fp32_attention

    def faulty(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        output, _ = right(*args, **kwargs)
        output = output.clone()
        calls.append(float(output[place]))
        if len(calls) == 2:
            output[place] = torch.nextafter(output[place], torch.tensor(torch.inf, dtype=torch.bfloat16))
        return output, None

    monkeypatch.setattr(attention, "fp32_attention", faulty)
    result = found(script, policies, 1)
    assert (result["layer"], result["found"], result["place"], result["elements"]) == (1, "attention", place, 1)
    assert result["engine"] == calls[1] < result["model"]
    assert result["fp32"] == pytest.approx(result["float64"], rel=1e-5)
    assert result["float64"] == pytest.approx(calls[1], rel=2**-8)


def test_a_difference_before_attention_is_told_apart(script: Any, policies: tuple[Policy, Policy]) -> None:
    ours, engines = policies
    with torch.no_grad():
        ours.model.model.layers[0].self_attn.v_proj.weight[0, 0] += 1
    result = found(script, (ours, engines), 0)
    assert result == {"layer": 0, "found": "the inputs of attention differ"}
