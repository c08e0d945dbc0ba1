"""The trainer's policy on a device: a small random Qwen3 under every scheme, beside the reference kernels."""

from __future__ import annotations

import pytest
import torch
from kernels_by_scheme import linear_kernels
from transformers import AutoModelForCausalLM, Qwen3Config

from qarl.config.level import Level
from qarl.kernels.registry import Choice
from qarl.quant.linear import QuantLinear
from qarl.quant.state_dict import low_bit_layers
from qarl.rollout.requests import RolloutBatch
from qarl.schemes import get_scheme
from qarl.trainer.batch import make_batch
from qarl.trainer.policy import Policy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8", "w4a8"])
def test_log_probs_and_gradients(scheme: str) -> None:
    """Log-probs near the reference kernels', and finite gradients."""
    config = Qwen3Config(
        vocab_size=2048, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=256, max_position_embeddings=1024, tie_word_embeddings=False,
        initializer_range=0.02,  # with 0.1 the log-probs of W8A8 differ by 0.1 between any two kernels, on a CPU too
    )  # fmt: skip
    device, length = torch.device("cuda", 0), 400
    rollout = RolloutBatch(
        [[3, 4, 5]] * 4, [list(range(10, 10 + length))] * 4, [[-1.0] * length] * 4, ["stop"] * 4, 0
    )
    batch = make_batch(rollout, torch.zeros(4), torch.zeros(4), pad_token_id=0).to(device)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    policy = Policy(model, get_scheme(scheme, 64), ("lm_head",), align=Level.MODEL)
    print(
        policy.align, sorted({layer.kernel.name for layer in low_bit_layers(policy.model).values()})
    )
    log_probs = policy.response_log_probs(batch, slice(0, 4), temperature=1.0)
    log_probs.sum().backward()
    assert all(
        bool(p.grad.isfinite().all()) for p in policy.model.parameters() if p.grad is not None
    )
    for module in policy.model.modules():
        if isinstance(module, QuantLinear):
            module.choice = Choice(linear_kernels(scheme)[-1], ())
            module.invalidate()
    with torch.no_grad():
        reference = policy.response_log_probs(batch, slice(0, 4), temperature=1.0)
    assert {layer.kernel.name for layer in low_bit_layers(policy.model).values()} == {"reference"}
    difference = float((log_probs.detach() - reference).abs().mean())
    print(
        f"mean difference of log-probs {difference:.2g}"
    )  # a doubled weight of one layer makes it 0.2
    assert difference < 0.1
