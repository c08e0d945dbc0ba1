"""Which parameters Muon updates, and by how much. tests/integration/trainer/test_optim.py compares it with the muon
package."""

from __future__ import annotations

import pytest
import torch

from qarl.errors import UserError
from qarl.optim.muon import orthogonalized, use_muon
from qarl.optim.muon_adamw import MuonAdamW


def test_muon_takes_the_hidden_matrices_of_a_qwen3() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = Qwen3Config(
        vocab_size=40, num_hidden_layers=2, head_dim=16, tie_word_embeddings=False, **sizes
    )
    model = Qwen3ForCausalLM(config)
    chosen = {name for name, p in model.named_parameters() if use_muon(name, p)}
    projections = [f"self_attn.{x}_proj" for x in "qkvo"] + [
        f"mlp.{x}_proj" for x in ("gate", "up", "down")
    ]
    assert chosen == {f"model.layers.{layer}.{p}.weight" for layer in range(2) for p in projections}


def test_muon_takes_stacked_experts_but_no_convolution() -> None:
    assert use_muon("model.layers.0.mlp.experts.down_proj", torch.empty(4, 8, 8))
    assert not use_muon("model.layers.0.linear_attn.conv1d.weight", torch.empty(8, 1, 4))


@pytest.mark.parametrize(("rows", "columns"), [(384, 128), (128, 384), (128, 128), (512, 64)])
def test_an_update_is_as_large_as_the_docs_say(rows: int, columns: int) -> None:
    """Spectral norm: sqrt(max(1, N / K)) times 1.05 to 1.2. Elements: 0.75 to 1 times 1 / sqrt(K), whatever N is."""
    update = orthogonalized(
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    ).double()
    singular = torch.linalg.svdvals(update) / max(1, rows / columns) ** 0.5
    assert 1.04 < singular.max() < 1.21
    assert singular.quantile(0.02) > 0.6
    assert 0.75 < update.square().mean().sqrt() * columns**0.5 < 1
    if (rows, columns) == (384, 128):
        assert float(torch.linalg.matrix_norm(update, 2)) == pytest.approx(1.97, abs=0.05)


@pytest.mark.parametrize("muon_lr", [None, 0.02])
def test_the_state_of_another_optimizer_is_refused(muon_lr: float | None) -> None:
    """As a checkpoint's is if optim.name has changed: verl gives it to the new optimizer."""
    weight = torch.nn.Parameter(torch.ones(4, 4))
    others = [
        torch.optim.AdamW([weight]),
        MuonAdamW([("layers.0.q_proj.weight", weight)], lr=0.1, muon_lr=0.1),
    ]
    optimizer = MuonAdamW([("layers.0.q_proj.weight", weight)], lr=0.1, muon_lr=muon_lr)
    with pytest.raises(UserError, match="state of another optimizer"):
        optimizer.load_state_dict(others[0 if muon_lr else 1].state_dict())
    optimizer.load_state_dict(optimizer.state_dict())


def test_each_expert_of_a_stack_gets_the_update_of_its_own_matrix() -> None:
    """The factor sqrt(max(1, N / K)) is that of a matrix. The number of experts does not count."""
    stack = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(0))
    updates = orthogonalized(stack).float()
    for update, matrix in zip(updates, stack, strict=True):
        torch.testing.assert_close(update, orthogonalized(matrix).float(), atol=0.02, rtol=0.0)
