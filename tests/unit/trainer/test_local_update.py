"""The local trainer's stages by themselves, without an engine: NaN gradients, and what an engine is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_helpers import config
from random_models import save_random_model
from updating_trainer import FOUR, four_responses, updating_trainer

from qarl.data.prompts import Prompt
from qarl.data.reward_workers import InProcessReward
from qarl.diagnose.diagnosis import with_keys
from qarl.metrics.phase_timer import PhaseTimer
from qarl.objectives import verl_functions
from qarl.rollout.engine import SamplingConfig
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.local import LocalTrainer

pytestmark = pytest.mark.usefixtures("in_the_checkout")


class Tokenizer:
    def batch_decode(self, ids: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        return ["x" if skip_special_tokens else "x<end>"] * len(ids)

    def __len__(self) -> int:
        return 100


def small_trainer(tmp_path: Path, master_dtype: str) -> Any:
    """Its batch has two mini-batches."""
    folder = f"model.path={save_random_model(tmp_path / 'model')}"
    keys = (
        folder,
        "actor.ppo_mini_batch_size=1",
        "quant.scheme=w8a8",
        "quant.align=linears",
        "optim.lr=1e-2",
    )
    return updating_trainer(config(tmp_path, *FOUR, *keys, f"optim.master_dtype={master_dtype}"))


def everything(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights, masters, moments and published tensors, cloned."""
    state = trainer.optimizer.state_dict()
    tensors = {f"weight.{name}": p for name, p in trainer.policy.model.named_parameters()}
    tensors |= {f"master.{name}": p for name, p in state["masters"].items()}
    for index, slots in state["inner"]["state"].items():
        tensors |= {f"moment.{index}.{name}": v for name, v in slots.items() if torch.is_tensor(v)}
    tensors |= {
        f"published.{name}": tensor
        for name, tensor in trainer.policy.published_tensors(stacks=False)
    }
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def test_a_mini_batch_is_divided_by_its_own_responses(tmp_path, monkeypatch):
    """Responses of 3 and 2 tokens, then of 1 and none: not by those of the whole batch, or of a micro-batch. An empty
    response does not count."""
    trainer, batch = small_trainer(tmp_path, "fp32"), four_responses()
    batch.response_mask[3] = False
    trainer.config = with_keys(trainer.config, {"actor.ppo_micro_batch_size_per_gpu": 1})
    wholes = []
    loss = trainer.loss
    monkeypatch.setattr(
        trainer, "loss", lambda *arguments: wholes.append(arguments[-1]) or loss(*arguments)
    )
    old = torch.full_like(batch.rollout_log_probs, -4.0)
    for start in (0, 2):
        trainer.backward(batch, old, slice(start, start + 2))
    assert wholes == [{"responses": 2, "tokens": 5}] * 2 + [{"responses": 1, "tokens": 1}] * 2


def test_the_kl_term_is_multiplied_by_its_factor(tmp_path, monkeypatch):
    trainer, batch = small_trainer(tmp_path, "fp32"), four_responses()
    trainer.objective = trainer.objective.model_copy(
        update={"use_kl_loss": True, "kl_loss_coef": 0.25}
    )
    seen = []
    monkeypatch.setattr(
        verl_functions,
        "kl_term",
        lambda *tensors, **whole: seen.append((*tensors, whole)) or torch.tensor(8.0),
    )
    old = torch.full_like(batch.rollout_log_probs, -4.0)
    rows, whole = slice(0, 2), {"responses": 2, "tokens": 5}
    without, _ = trainer.loss(batch, old, rows, old[rows], whole)
    batch.reference_log_probs = torch.full_like(old, -5.0)
    loss, statistics = trainer.loss(batch, old, rows, old[rows], whole)
    assert float(loss - without) == 2.0 and statistics["sum/kl_loss"] == 8.0
    ((new, reference, mask, _, denominators),) = seen
    assert torch.equal(new, old[rows]) and torch.equal(reference, batch.reference_log_probs[rows])
    assert torch.equal(mask, batch.response_mask[rows]) and denominators == whole


@pytest.mark.parametrize("master_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(tmp_path, bad, master_dtype):
    """One parameter of the second mini-batch's gradient is spoilt: the first step happens, the second does not."""
    trainer, batch = small_trainer(tmp_path, master_dtype), four_responses()
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


@pytest.fixture
def asking(tmp_path) -> Iterator[LocalTrainer]:
    """A trainer without an engine: `asked` holds what `generate` was called with, `answer` is its weight version."""
    trainer: Any = object.__new__(LocalTrainer)
    trainer.config = config(
        tmp_path, "rollout.n=2", "rollout.temperature=0.7", "actor.ppo_micro_batch_size_per_gpu=4"
    )
    trainer.timer, trainer.step, trainer.asked, trainer.answer = PhaseTimer(), 3, [], 3
    prompts = [Prompt(i, "sums", [], [5, 6 + i], "7") for i in range(2)]
    trainer.parts = SimpleNamespace(
        conversations=None,
        train_prompts=prompts,
        val_prompts=prompts,
        sampler=iter([[0, 1]] * 2),
        reward_fn=InProcessReward("half", lambda **_: 0.5),
        pad_token_id=0,
    )
    trainer.policy = SimpleNamespace(device=torch.device("cpu"))
    trainer.engine = SimpleNamespace(sleep=lambda: None)
    trainer.tokenizer = Tokenizer()

    def generate(
        prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None = None
    ) -> RolloutBatch:
        trainer.asked.append((prompts, sampling, seeds))
        count = len(prompts)
        return RolloutBatch(
            prompts, [[7]] * count, [[-1.0]] * count, ["stop"] * count, trainer.answer
        )

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
    assert asking.evaluate()["val/accuracy"] == 0.5
    (prompts, sampling, seeds), (held_out, greedy, _) = asking.asked
    assert prompts == [[5, 6], [5, 6], [5, 7], [5, 7]] and len(set(seeds)) == 4
    assert sampling.temperature == 0.7
    assert held_out == [[5, 6], [5, 7]] and greedy.temperature == 0.0


def test_each_batch_of_a_filtered_step_has_seeds_of_its_own(asking, tmp_path):
    """Every group is equal, so two batches are sampled. The first has the seeds of a step without the filter."""
    asking.parts.sampler = iter([[0, 1]] * 3)
    asking.rollout()
    filtered = ("filter_groups.enable=true", "filter_groups.max_num_gen_batches=2")
    sizes = ("rollout.n=2", "data.train_batch_size=2", "actor.ppo_mini_batch_size=2")
    asking.config = config(tmp_path, *filtered, *sizes, "actor.ppo_micro_batch_size_per_gpu=4")
    assert asking.rollout()[1]["filter_groups/num_gen_batches"] == 2
    plain, first, second = (seeds for _, _, seeds in asking.asked)
    assert first == plain
    assert len({*first, *second}) == 8


@pytest.mark.parametrize(
    ("keys", "text"), [((), "x"), (("reward.keep_special_tokens=true",), "x<end>")]
)
def test_the_text_that_a_reward_gets(asking, tmp_path, keys, text):
    asking.config = config(tmp_path, "rollout.n=2", "actor.ppo_micro_batch_size_per_gpu=4", *keys)
    asking.parts.reward_fn = InProcessReward(
        "same", lambda solution_str, **_: float(solution_str == text)
    )
    assert asking.rollout()[0].rewards.tolist() == [1.0] * 4
    assert asking.evaluate()["val/accuracy"] == 1.0
