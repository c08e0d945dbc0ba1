"""`model.dtype=fp16`: dynamic loss scaling, its checkpoint, what is refused, and a run against vLLM in FP16."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import config
from transformers import AutoModelForCausalLM
from updating_trainer import FOUR, four_responses, updating_trainer

from qarl.config import ConfigError
from qarl.errors import UserError
from qarl.trainer.batch import Batch
from qarl.trainer.load_weights import check_finite
from qarl.trainer.loop import train
from qarl.trainer.master_optimizer import FIRST, INTERVAL, LARGEST, LossScale

pytestmark = pytest.mark.usefixtures("in_the_checkout")
FP16 = ("model.dtype=fp16", "quant.scheme=bf16", "quant.align=off")


@pytest.mark.parametrize(
    ("events", "scale"),
    [
        ("", FIRST),
        ("x", FIRST / 2),
        ("xx", FIRST / 4),
        ("." * INTERVAL, FIRST * 2),
        ("." * (INTERVAL - 1) + "x" + "." * (INTERVAL - 1), FIRST / 2),
        ("x" + "." * INTERVAL, FIRST),
        ("x" * 30, 1.0),
        ("." * INTERVAL * 20, LARGEST),
    ],
    ids=["new", "overflow", "two", "good", "counted anew", "back", "smallest", "largest"],
)
def test_how_the_scale_moves(events, scale):
    state = LossScale(active=True)
    for event in events:
        state.updated(overflow=event == "x")
    assert state.scale == scale and state.overflows == events.count("x")
    restored = LossScale(active=True)
    restored.load_state_dict(state.state_dict())
    assert vars(restored) == vars(state)


def trainer_for(folder: Path, tmp_path: Path) -> Any:
    keys = (
        *FP16,
        *FOUR,
        f"model.path={folder}",
        "optim.lr=1e-3",
        "actor.grad_clip=1e9",
        "actor.ppo_mini_batch_size=2",
    )
    return updating_trainer(config(tmp_path, *keys))


def gradient(trainer: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """The FP32 sums of a mini-batch, divided by the loss scale."""
    with torch.no_grad():
        old = trainer.policy.response_log_probs(batch, slice(0, 4), temperature=1.0)
    trainer.backward(batch, old, slice(0, 4))
    trainer.optimizer.clip_grad_norm(math.inf)
    return {name: value.clone() for name, value in trainer.optimizer.gradients.items()}


def test_small_gradients_survive_and_are_those_of_fp32(pristine_model, tmp_path):
    """With advantages of 1e-5, FP16 gradients underflow without a scale. FP32 on the same weights is the truth."""
    batch, errors = four_responses((1e-5, -1e-5, 1e-5, -1e-5)), {}
    exact = trainer_for(pristine_model, tmp_path)
    exact.policy.model.float()
    exact.optimizer.loss_scale.scale = 1.0
    truth = gradient(exact, batch)
    for scale in (1.0, FIRST):
        trainer = trainer_for(pristine_model, tmp_path)
        trainer.optimizer.loss_scale.scale = scale
        gradients = gradient(trainer, batch)
        assert gradients.keys() == truth.keys() and all(
            value.dtype == torch.float32 for value in gradients.values()
        )
        difference = sum(float((gradients[name] - truth[name]).square().sum()) for name in truth)
        errors[scale] = math.sqrt(
            difference / sum(float(value.square().sum()) for value in truth.values())
        )
    assert errors[FIRST] < 0.02 < 0.1 < errors[1.0]


def test_an_overflow_skips_the_update_and_halves_the_scale(pristine_model, tmp_path):
    trainer, batch = trainer_for(pristine_model, tmp_path), four_responses((1e4, -1e4, 1e4, -1e4))
    before = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    with torch.no_grad():
        old = trainer.policy.response_log_probs(batch, slice(0, 4), temperature=1.0)
    metrics = trainer.update(batch, old)
    assert (metrics["actor/skipped_steps"], metrics["actor/overflows"]) == (1, 1)
    assert metrics["actor/loss_scale"] == FIRST / 2 and trainer.optimizer.gradients == {}
    assert "actor/grad_norm" not in metrics and all(
        math.isfinite(value) for value in metrics.values()
    )
    assert all(torch.equal(p, before[name]) for name, p in trainer.policy.model.named_parameters())
    for _ in range(30):
        metrics = trainer.update(batch, old)
        if not metrics["actor/skipped_steps"]:
            break
    assert not metrics["actor/skipped_steps"] and metrics["actor/loss_scale"] < FIRST / 2
    assert metrics["actor/grad_norm"] > 0
    assert any(
        not torch.equal(p, before[name]) for name, p in trainer.policy.model.named_parameters()
    )
    assert all(
        bool(p.isfinite().all()) and p.dtype == torch.float16
        for p in trainer.policy.model.parameters()
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["quant.scheme=w4a16"], "w4a16 take BF16 weights"),
        (["quant.scheme=w8a8"], "w8a8 take BF16 weights"),
        (["quant.scheme=fp8"], "fp8 take BF16 weights"),
        (["quant.scheme=bf16", "backend=verl"], "backend=verl trains in BF16"),
        (["quant.scheme=bf16", "optim.master_dtype=bf16"], "stochastic rounding"),
    ],
)
def test_what_does_not_run_in_fp16_is_refused(tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=r"model\.dtype") as caught:
        config(tmp_path, "model.dtype=fp16", *overrides)
    assert words in str(caught.value)


def test_weights_beyond_fp16_are_refused(pristine_model):
    model = AutoModelForCausalLM.from_pretrained(pristine_model, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight[0] = 1e5
    check_finite(model, "bf16")
    with pytest.raises(UserError, match="1 weights are NaN or Inf in FP16") as caught:
        check_finite(model.half(), "fp16")
    assert "model.norm.weight" in str(caught.value)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_in_fp16_has_a_smaller_mismatch_than_in_bf16(tmp_path):
    """arXiv 2510.26788, without alignment; the scale is in the metrics and the export is FP16."""
    from safetensors.torch import load_file

    mismatch = {}
    for dtype in ("bf16", "fp16"):
        keys = (
            "quant.scheme=bf16",
            "quant.align=off",
            "trainer.total_training_steps=2",
            "trainer.val_max_prompts=8",
        )
        settings = config(
            tmp_path, *keys, f"model.dtype={dtype}", f"name={dtype}", "trainer.logger=[]"
        )
        summary = train(settings)
        assert summary["finished"] and summary["steps"] == 2
        mismatch[dtype] = summary["mismatch_abs_mean"]
    assert 0 < mismatch["fp16"] < mismatch["bf16"] / 3
    exported = load_file(tmp_path / "fp16" / "export" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float16}
