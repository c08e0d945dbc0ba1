"""The forward of verl's engine: rows, replayed experts, and lm_head that returns log-probs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_models import save_random_model
from transformers import AutoModelForCausalLM
from verl_runs import quickstart

from qarl.kernels import log_probs
from qarl.verl.config import fsdp_engine_settings, routing_keys

pytest.importorskip("verl")

from verl.utils import tensordict_utils as tu

from qarl.verl.forward import (
    LogProbHead,
    as_forward,
    replace_head,
    request_log_probs,
    take_log_probs,
)

pytestmark = pytest.mark.verl

LENGTHS, VOCABULARY = (40, 25), 60


def load(folder: Path, **changes: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        save_random_model(folder, **changes), dtype=torch.bfloat16
    )


def packed(**flags: Any) -> tuple[Any, dict[str, Any], torch.Tensor]:
    """verl's micro-batch of two rows, its output arguments, and the packed ids."""
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCABULARY, (length,), generator=random) for length in LENGTHS]
    batch = tu.get_tensordict(
        {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, {}
    )
    tu.assign_non_tensor(batch, **{"temperature": 0.7, "calculate_entropy": False} | flags)
    ids = torch.cat(rows)
    arguments = {
        "input_ids_rmpad_rolled": ids.roll(-1),
        "temperature_rmpad": torch.full(ids.shape, 0.7),
        "pad_size": 0,
    }
    return batch, arguments, ids[None]


def outputs(
    head: LogProbHead | None, model: Any, batch: Any, arguments: Any, ids: torch.Tensor
) -> Any:
    request_log_probs(head, batch, arguments)
    output = model(input_ids=ids, use_cache=False)
    return take_log_probs(head, output, batch, arguments, lambda values, pad: values), output.logits


@pytest.mark.parametrize("at_a_time", [2**27, 64 * VOCABULARY])
def test_log_probs_and_gradients_are_those_of_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    """Bit for bit where one block holds all; the weight's gradient is summed over blocks in FP32 else."""
    monkeypatch.setattr(log_probs, "LOGITS_AT_A_TIME", at_a_time)
    model = load(tmp_path)
    batch, arguments, ids = packed()
    logits = model(input_ids=ids, use_cache=False).logits[0, :, :VOCABULARY].float() / 0.7
    expected = logits.log_softmax(-1).gather(1, arguments["input_ids_rmpad_rolled"][:, None])[:, 0]
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weight).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    names = [name for name, _ in model.named_parameters()]
    head = replace_head(model, VOCABULARY)
    assert head is model.lm_head and [name for name, _ in model.named_parameters()] == names
    output, returned = outputs(head, model, batch, arguments, ids)
    assert returned.shape == (1, sum(LENGTHS), 1)
    assert output.keys() == {"log_probs"} and output["log_probs"].offsets().tolist() == [0, 40, 65]
    assert torch.equal(output["log_probs"].values(), expected)
    (output["log_probs"].values() * weight).sum().backward()
    for name, parameter in model.named_parameters():
        error = (parameter.grad.float() - gradients[name].float()).abs().max()
        assert float(error) <= 2**-7 * float(gradients[name].abs().max()), name
    assert not head.weight.grad[VOCABULARY:].any()
    assert (
        outputs(None, model, batch, arguments, ids)[1].shape[-1] == 64
    )  # nothing is asked of the next forward


def test_entropies_come_with_the_old_log_probs(tmp_path: Path) -> None:
    model = load(tmp_path)
    head = replace_head(model, VOCABULARY)
    batch, arguments, ids = packed(calculate_entropy=True)
    with torch.no_grad():
        logits = outputs(None, model, batch, arguments, ids)[1][0, :, :VOCABULARY].float() / 0.7
        output, _ = outputs(head, model, batch, arguments, ids)
    exact = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(output["entropy"].values(), exact, atol=1e-5)
    assert output["log_probs"].shape == output["entropy"].shape


def test_everything_else_gets_logits(tmp_path: Path) -> None:
    head = replace_head(load(tmp_path), VOCABULARY)
    batch, arguments, _ = packed()
    several = packed()[0]
    several["temperature"] = torch.full((2,), 0.7)  # one for each row
    padded = {key: value for key, value in arguments.items() if key != "temperature_rmpad"}
    # With gradients, for the entropies.
    flags = ("calculate_entropy", "calculate_sum_pi_squared", "distillation_use_topk")
    for case, options in (
        (batch, padded),
        (several, arguments),
        *((packed(**{f: True})[0], arguments) for f in flags),
    ):
        request_log_probs(head, case, options)
        assert head.request is None
    request_log_probs(head, batch, arguments)
    assert head.request.temperature == 0.7


def test_other_heads_stay_and_a_tied_one_keeps_its_weight(tmp_path: Path) -> None:
    model = load(tmp_path, tie=True)
    for family, head in (("gemma2", model.lm_head), ("qwen3", torch.nn.Linear(128, 64))):
        config: Any = SimpleNamespace(model_type=family)
        plain = SimpleNamespace(config=config, get_output_embeddings=lambda head=head: head)
        assert replace_head(plain, VOCABULARY) is None
    replaced = replace_head(model, VOCABULARY)
    assert replaced is not None and replaced.weight is model.model.embed_tokens.weight


REPLAY = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


def routed(*lengths: int) -> torch.Tensor:
    """[rows, tokens, 2 layers, 3 experts]: each number says its row and token."""
    rows = [
        (100 * row + torch.arange(length)).view(-1, 1, 1).expand(-1, 2, 3).to(torch.int16)
        for row, length in enumerate(lengths)
    ]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize(
    ("lengths", "shape", "places"),
    [
        ((2, 3), (2, 4), [0, 1, -1, -1, 100, 101, 102, -1]),  # padded
        ((2, 3), (1, 7), [0, 1, 100, 101, 102, -1, -1]),  # packed, with padding behind
        ((3,), (1, 5), [0, 1, 2, -1, -1]),
    ],
)
def test_the_routing_of_each_position(lengths, shape, places):
    routing = as_forward(routed(*lengths), torch.zeros(*shape, dtype=torch.int64))
    assert routing.shape == (len(places), 2, 3) and routing[:, 1, 2].tolist() == places


@pytest.mark.parametrize(
    ("family", "align", "asked", "on_cpu", "expected"),
    [
        ("qwen3_moe", "linears", "auto", True, True),
        ("qwen3_moe", "model", "auto", True, False),
        ("qwen3_moe", "model", "auto", False, True),  # `model` falls back to linears on a GPU
        ("qwen3_moe", "model", "on", True, True),
        ("qwen3_moe", "off", "off", True, False),
        ("qwen3", "off", "on", True, False),
    ],
)
def test_servers_return_the_routing_that_is_replayed(
    tmp_path, family, align, asked, on_cpu, expected
):
    path = str(save_random_model(tmp_path, family))
    config = quickstart(
        **{"model.path": path, "quant.align": align, "rollout.router_replay": asked}
    )
    keys = routing_keys(config, on_cpu)
    assert keys[REPLAY] is expected
    assert fsdp_engine_settings(config)["router_replay"] == asked
