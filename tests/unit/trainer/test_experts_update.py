"""A mixture of experts through an update, a checkpoint and a resume: masters, published bytes, and what Muon does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import config
from random_models import save_random_model
from updating_trainer import through_checkpoint, updating_trainer

from qarl.checkpoint.model_files import read_tensors
from qarl.checkpoint.resumable import tensor_digest
from qarl.quant.experts import unstacked
from qarl.quant.state_dict import low_bit_layers, requantize
from qarl.trainer.checkpoints import differing_tensors, forward_weights

pytestmark = pytest.mark.usefixtures("in_the_checkout")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe")


def make_run(folder: Path, output: Path, *keys: str, align: str = "linears") -> Any:
    scheme = (
        "quant.scheme=w4a16",
        "quant.group_size=32",
        f"quant.align={align}",
        "actor.old_log_probs=recompute",
    )
    trainer = updating_trainer(
        config(output, f"model.path={folder}", *scheme, "optim.lr=1e-3", *keys)
    )
    trainer.step = 0
    return trainer


def train_step(run: Any) -> None:
    run.step += 1
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(run.step))
    run.policy.model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)[
        ..., 5
    ].sum().backward()
    run.optimizer.accumulate()
    run.optimizer.step()


def published(run: Any) -> dict[str, str]:
    return {
        name: tensor_digest(tensor) for name, tensor in run.policy.published_tensors(stacks=False)
    }


@pytest.mark.parametrize(
    ("optimizer", "master"), [("adamw", "fp32"), ("adamw", "bf16"), ("muon", "fp32")]
)
def test_a_resumed_run_has_the_bytes_of_one_that_was_not_interrupted(
    folder: Path, tmp_path: Path, optimizer: str, master: str
) -> None:
    keys = [
        f"optim.name={optimizer}",
        f"optim.master_dtype={master}",
        *["optim.muon_lr=1e-3"] * (optimizer == "muon"),
    ]
    whole, resumed = (make_run(folder, tmp_path, *keys) for _ in range(2))
    before = published(whole)
    train_step(whole)
    after = published(whole)
    low_bit = [
        name for name in after if ".experts." in name and name.endswith(("_packed", "weight_scale"))
    ]
    # Experts that had no token keep their weights in AdamW's first step; Muon moves them, too.
    changed = {
        name.split(".")[2] + name.split(".")[6] for name in low_bit if before[name] != after[name]
    }
    assert {
        "0gate_proj",
        "0up_proj",
        "0down_proj",
        "1gate_proj",
        "1up_proj",
        "1down_proj",
    } <= changed
    through_checkpoint(whole, resumed)
    saved = whole.config.run_dir / "checkpoints" / "step_1"
    assert "model.layers.0.mlp.experts.0.down_proj.weight" in dict(read_tensors(saved))
    assert differing_tensors(after, resumed.policy) == []
    for run in (whole, resumed):
        train_step(run)
    assert published(resumed) == published(whole) != after
    masters = [run.optimizer.state_dict()["masters"] for run in (whole, resumed)]
    assert all(torch.equal(masters[0][name], masters[1][name]) for name in masters[0])
    if master == "fp32":
        live = dict(forward_weights(resumed.policy))
        assert all(
            torch.equal(m.bfloat16(), live[name]) for name, m in unstacked(masters[1].items())
        )


def test_the_layers_of_a_policy_are_requantized_with_the_linears(
    folder: Path, tmp_path: Path
) -> None:
    run = make_run(folder, tmp_path, align="model")
    layers = low_bit_layers(run.policy.model)
    assert len(layers) == 2 * (4 + 1) and "model.layers.1.mlp.experts" in layers
    assert (
        "the experts of 2 layers" in run.policy.report and "aligned: 2 routers" in run.policy.report
    )
    requantize(run.policy.model)
    assert not any(layer.stale for layer in layers.values())
    train_step(run)
    assert all(layer.stale for layer in layers.values())
    requantize(run.policy.model)
    assert not any(layer.stale for layer in layers.values())
