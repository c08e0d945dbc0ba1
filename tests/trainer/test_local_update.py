"""The local trainer's stages by themselves, without an engine: NaN gradients, what the backward multiplies by later,
empty responses, and what an engine is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_helpers import config
from random_models import save_random_model
from torch import nn
from transformers import AutoModelForCausalLM

from qarl.config import OptimConfig
from qarl.data import Prompt
from qarl.metrics.mismatch import PhaseTimer
from qarl.objectives.settings import Settings
from qarl.optim.loss_scale import LossScale
from qarl.quant import get_scheme
from qarl.quant.linear import QuantLinear
from qarl.rollout.engine import RolloutBatch, SamplingConfig
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.optim import MasterOptimizer
from qarl.trainer.policy import Policy

pytestmark = pytest.mark.usefixtures("in_the_checkout")


class _Config:
    """The keys that `LocalTrainer.update` reads."""

    class actor:
        ppo_mini_batch_size = 1
        use_dynamic_bsz = False
        ppo_micro_batch_size_per_gpu = 2
        ppo_epochs = 1
        grad_clip = 1.0

    class rollout:
        n = 2
        temperature = 1.0


class Tokenizer:
    def batch_decode(self, ids: list[list[int]], **_: Any) -> list[str]:
        return ["x"] * len(ids)

    def __len__(self) -> int:
        return 100


def small_trainer(folder, master_dtype: str) -> LocalTrainer:
    model = AutoModelForCausalLM.from_pretrained(save_random_model(folder), dtype=torch.bfloat16)
    trainer = object.__new__(LocalTrainer)
    trainer.config, trainer.objective, trainer.timer = _Config, Settings(), PhaseTimer()
    trainer.source, trainer.loss_scale = SimpleNamespace(see=lambda *seen: None), LossScale(active=False)
    trainer.policy = Policy(model, get_scheme("w8a8"), ("lm_head",), align="linears")
    settings = OptimConfig(lr=1e-2, master_dtype=master_dtype)
    trainer.optimizer = MasterOptimizer(model.named_parameters(), settings, total_training_steps=10, seed=0)
    return trainer


def four_responses() -> Batch:
    """Two prompts with two responses each: two mini-batches."""
    tokens = [[7, 8, 9], [10, 11], [12], [13, 14]]
    log_probs = [[-4.0] * len(one) for one in tokens]
    rollout = RolloutBatch([[5, 6]] * 4, tokens, log_probs, ["stop"] * 4, weight_version=0)
    return make_batch(rollout, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), pad_token_id=0)


def everything(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    """Weights, masters, moments and published tensors, cloned."""
    state = trainer.optimizer.state_dict()
    found = {f"weight.{name}": p for name, p in trainer.policy.model.named_parameters()}
    found |= {f"master.{name}": p for name, p in state["masters"].items()}
    for index, slots in state["inner"]["state"].items():
        found |= {f"moment.{index}.{name}": v for name, v in slots.items() if torch.is_tensor(v)}
    found |= {f"published.{name}": tensor for name, tensor in trainer.policy.packed_state_dict()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


@pytest.mark.parametrize("master_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(tmp_path, bad, master_dtype):
    """One parameter of the second mini-batch's gradient is spoilt: the first step happens, the second does not."""
    trainer, batch = small_trainer(tmp_path / "model", master_dtype), four_responses()
    with torch.no_grad():
        old = trainer.policy.response_log_probs(batch, slice(0, 4), temperature=1.0)
    start = everything(trainer)
    step, after_first = trainer.optimizer_step, {}

    def spoil() -> float:
        if after_first:
            next(iter(trainer.optimizer.gradients.values())).view(-1)[0] = bad
        norm = step()
        if not after_first:
            after_first.update(everything(trainer))
        return norm

    trainer.optimizer_step = spoil
    metrics = trainer.update(batch, old)
    assert metrics["actor/skipped_steps"] == 1 and not math.isfinite(metrics["actor/grad_norm"])
    assert trainer.optimizer.gradients == {}
    end = everything(trainer)
    assert end.keys() == after_first.keys()
    assert all(torch.equal(end[name], after_first[name]) for name in end)
    assert all(tensor.isfinite().all() for tensor in end.values() if tensor.is_floating_point())
    moved = [name for name in start if not torch.equal(start[name], end[name])]
    assert moved, "the sound mini-batch was trained on"


@pytest.mark.parametrize("kernel", [None, "reference"])
@pytest.mark.parametrize("name", ["w4a16", "w8a8", "fp8"])
def test_after_an_update_the_backward_multiplies_by_the_new_weight(name, kernel):
    """dX = dY Ŵ with the Ŵ of the forward before it, again and again."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
    layer = QuantLinear(linear, get_scheme(name, group_size=32), qualified_name="layer", kernel=kernel)
    dy = torch.randn(20, 96, generator=generator).bfloat16()
    gradients = []
    for _ in range(3):
        x = torch.randn(20, 64, generator=generator).bfloat16().requires_grad_()
        layer(x).backward(dy)
        expected = dy.double() @ layer.quantized().dequantize(torch.float64)
        assert (x.grad.double() - expected).norm() <= 0.02 * expected.norm()
        gradients.append(x.grad)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(96, 64, generator=generator))
    assert (gradients[1] - gradients[0]).norm() > gradients[0].norm()


def test_a_response_without_tokens_does_not_thin_the_gradient(tmp_path):
    trainer = small_trainer(tmp_path / "model", "fp32")
    tokens = [[7, 8, 9], [10, 11], [12], []]
    log_probs = [[-4.0] * len(one) for one in tokens]
    rollout = RolloutBatch([[5, 6]] * 4, tokens, log_probs, ["stop"] * 3 + ["abort"], weight_version=0)
    batch = make_batch(rollout, torch.zeros(4), torch.tensor([1.0, -0.5, 2.0, 1.0]), pad_token_id=0)
    with torch.no_grad():
        old = trainer.policy.response_log_probs(batch, slice(0, 4), temperature=1.0)
    losses, norms = [], []
    for stop in (3, 4):
        losses.append(sum(one["sum/loss"] for one in trainer.backward(batch, old, 0, stop)))
        norms.append(trainer.optimizer.clip_grad_norm(1e9))
        trainer.optimizer.zero_grad()
    assert losses[0] != 0 and losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert norms[0] > 0 and norms[1] == pytest.approx(norms[0], rel=1e-3)


@pytest.fixture
def asking(tmp_path) -> Iterator[LocalTrainer]:
    """A trainer without an engine: `asked` holds what `generate` was called with, `answer` is its weight version."""
    trainer: Any = object.__new__(LocalTrainer)
    trainer.config = config(tmp_path, "rollout.n=2", "rollout.temperature=0.7", "actor.ppo_micro_batch_size_per_gpu=4")
    trainer.timer, trainer.step, trainer.asked, trainer.answer = PhaseTimer(), 3, [], 3
    prompts = [Prompt(i, "sums", [], [5, 6 + i], "7") for i in range(2)]
    trainer.parts = SimpleNamespace(
        train_prompts=prompts,
        val_prompts=prompts,
        sampler=iter([[0, 1]] * 2),
        reward_fn=lambda **_: 0.5,
        pad_token_id=0,
    )
    trainer.policy = SimpleNamespace(device=torch.device("cpu"))
    trainer.engine = SimpleNamespace(sleep=lambda: None)
    trainer.tokenizer = Tokenizer()

    def generate(prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None = None) -> RolloutBatch:
        trainer.asked.append((prompts, sampling, seeds))
        count = len(prompts)
        return RolloutBatch(prompts, [[7]] * count, [[-1.0]] * count, ["stop"] * count, trainer.answer)

    trainer.generate = generate
    yield trainer


@pytest.mark.parametrize("version", [2, 4])
def test_responses_of_other_weights_are_not_trained_on(asking, version):
    asking.rollout()
    asking.answer = version
    with pytest.raises(RuntimeError, match=f"step 3 was sampled from weights of version {version}"):
        asking.rollout()


def test_every_response_is_asked_for_with_a_seed_and_evaluations_are_greedy(asking):
    asking.rollout()
    assert asking.evaluate() == {"val/accuracy": 0.5}
    (prompts, sampling, seeds), (held_out, greedy, _) = asking.asked
    assert prompts == [[5, 6], [5, 6], [5, 7], [5, 7]] and len(set(seeds)) == 4
    assert sampling.temperature == 0.7
    assert held_out == [[5, 6], [5, 7]] and greedy.temperature == 0.0
