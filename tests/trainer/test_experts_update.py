"""A mixture of experts through an update, a checkpoint and a resume: masters, published bytes, and what Muon does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from checkpoint_state import whole_state
from random_models import save_random_model

from qarl.checkpoint.compressed_tensors import ModelFiles, read_tensors
from qarl.checkpoint.folder import open_checkpoint, save_checkpoint, tensor_digest, tensors_digest
from qarl.config import OptimConfig
from qarl.quant import get_scheme
from qarl.quant.expert_names import unstacked
from qarl.trainer.checkpoints import differing_tensors, forward_weights, prompts_digest, restore
from qarl.trainer.optim import MasterOptimizer
from qarl.trainer.policy import Policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe")


class Run:
    """What `restore` reads of a trainer."""

    def __init__(self, folder: Path, optimizer: str, master: str, align: str = "linears") -> None:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.policy = Policy(model, get_scheme("w4a16", group_size=32), ("lm_head",), align=align)
        settings = OptimConfig(name=optimizer, lr=1e-3, muon_lr=1e-3, master_dtype=master)
        self.optimizer = MasterOptimizer(model.named_parameters(), settings, seed=0, total_training_steps=9)
        self.step = 0
        self.config = SimpleNamespace(actor=SimpleNamespace(old_log_probs="recompute"))
        self.parts = SimpleNamespace(train_prompts=[], sampler=SimpleNamespace(load_state_dict=lambda state: None))

    def train_step(self) -> None:
        self.step += 1
        ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(self.step))
        logits = self.policy.model(input_ids=ids, use_cache=False).logits
        logits.float().log_softmax(-1)[..., 5].sum().backward()
        self.optimizer.accumulate()
        self.optimizer.step()

    def published(self) -> dict[str, str]:
        return {name: tensor_digest(tensor) for name, tensor in self.policy.packed_state_dict()}

    def save(self, folder: Path) -> Path:
        state = whole_state(step=self.step, config={"quant": {}, "optim": {}, "trainer": {}}) | {
            "weights": tensors_digest(forward_weights(self.policy)),
            "train_prompts": prompts_digest([]),
            "sampler": {},
        }
        save_checkpoint(
            folder,
            files=ModelFiles.of(self.policy.model, SimpleNamespace(save_pretrained=lambda folder: None)),
            weights=forward_weights(self.policy),
            optimizer=self.optimizer.state_dict(),
            rng={},
            state=state,
        )
        return folder


@pytest.mark.parametrize(("optimizer", "master"), [("adamw", "fp32"), ("adamw", "bf16"), ("muon", "fp32")])
def test_a_resumed_run_has_the_bytes_of_one_that_was_not_interrupted(
    folder: Path, tmp_path: Path, optimizer: str, master: str
) -> None:
    whole = Run(folder, optimizer, master)
    before = whole.published()
    whole.train_step()
    after = whole.published()
    low_bit = [name for name in after if ".experts." in name and name.endswith(("_packed", "weight_scale"))]
    # Experts that had no token keep their weights in AdamW's first step; Muon and weight decay move the rest.
    changed = {name.split(".")[2] + name.split(".")[6] for name in low_bit if before[name] != after[name]}
    assert {"0gate_proj", "0up_proj", "0down_proj", "1gate_proj", "1up_proj", "1down_proj"} <= changed
    saved = whole.save(tmp_path / "checkpoints" / "step_1")
    assert "model.layers.0.mlp.experts.0.down_proj.weight" in dict(read_tensors(saved))
    resumed = Run(folder, optimizer, master)
    restore(resumed, open_checkpoint(saved))
    assert differing_tensors(after, resumed.policy) == []
    for run in (whole, resumed):
        run.train_step()
    assert resumed.published() == whole.published() != after
    masters = [run.optimizer.state_dict()["masters"] for run in (whole, resumed)]
    assert all(torch.equal(masters[0][name], masters[1][name]) for name in masters[0])
    if master == "fp32":
        live = dict(forward_weights(resumed.policy))
        assert all(torch.equal(m.bfloat16(), live[name]) for name, m in unstacked(masters[1].items()))


def test_the_layers_of_a_policy_are_requantized_with_the_linears(folder: Path) -> None:
    run = Run(folder, "adamw", "fp32", align="model")
    layers = run.policy.quantized_layers()
    assert len(layers) == 2 * (4 + 1) and "model.layers.1.mlp.experts" in layers
    assert "the experts of 2 layers" in run.policy.report and "aligned: 2 routers" in run.policy.report
    run.policy.requantize()
    assert not any(layer.stale for layer in layers.values())
    run.train_step()
    assert all(layer.stale for layer in layers.values())
    run.policy.requantize()
    assert not any(layer.stale for layer in layers.values())
