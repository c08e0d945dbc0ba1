"""Routing from verl's batches in the order of an actor's forward, and verl's keys for it."""

from __future__ import annotations

import pytest
import torch
from random_models import save_random_model
from verl_runs import quickstart

from qarl.verl.plugin.routing import as_forward
from qarl.verl.routing import routing_keys

REPLAY = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


def routed(*lengths: int) -> torch.Tensor:
    """[rows, tokens, 2 layers, 3 experts]: each number says its row and token."""
    rows = [
        (100 * row + torch.arange(length)).view(-1, 1, 1).expand(-1, 2, 3).to(torch.int16)
        for row, length in enumerate(lengths)
    ]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def test_padded_rows():
    given = as_forward(routed(2, 3), torch.zeros(2, 4, dtype=torch.int64))
    assert given.shape == (8, 2, 3)
    assert given[:, 0, 0].tolist() == [0, 1, -1, -1, 100, 101, 102, -1]


def test_packed_rows_with_padding_behind():
    given = as_forward(routed(2, 3), torch.zeros(1, 7, dtype=torch.int64))
    assert given[:, 1, 2].tolist() == [0, 1, 100, 101, 102, -1, -1]


def test_one_row_alone():
    given = as_forward(routed(3), torch.zeros(1, 5, dtype=torch.int64))
    assert given[:, 0, 0].tolist() == [0, 1, 2, -1, -1]


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
def test_servers_return_the_routing_that_is_replayed(tmp_path, family, align, asked, on_cpu, expected):
    path = str(save_random_model(tmp_path, family))
    config = quickstart(**{"model.path": path, "quant.align": align, "rollout.router_replay": asked})
    keys = routing_keys(config, on_cpu)
    assert keys[REPLAY] is expected


def test_servers_of_several_workers_return_the_routing(tmp_path):
    """With them `model` falls back to linears."""
    changes = {"model.path": str(save_random_model(tmp_path, "qwen3_moe")), "trainer.n_gpus_per_node": 2}
    for workers in (1, 2):
        config = quickstart(**changes, **{"rollout.tensor_model_parallel_size": workers})
        assert routing_keys(config, True)[REPLAY] is (workers == 2)
