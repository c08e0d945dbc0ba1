"""Whole steps of the local backend against a twin in float64 that shares no code with QaRL (`twin_checks`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpu_features import needs_w4a16_cpu
from random_models import save_random_model
from twin_checks import follow, same
from twin_metrics import MEASURED
from twin_run import recorded_trainer, resumed, settings_for

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.long]

ROWS: dict[str, list[str]] = {
    "tbpo-grpo-w8a8-adamw": [
        "quant.scheme=w8a8",
        "optim.lr=1e-3",
        "optim.weight_decay=0.1",
        "optim.betas=[0.8,0.95]",
        "optim.lr_warmup_steps=2",
        "rollout.temperature=0.8",
        "actor.positive_band=two_sided",
        "actor.seq_clip_ratio_low=0.015",
        "actor.seq_tis_imp_ratio_cap=1.05",
    ],
    "tbpo-rloo-bf16-muon": [
        "quant.scheme=bf16",
        "optim.name=muon",
        "optim.lr=5e-4",
        "optim.muon_lr=3e-3",
        "optim.muon_momentum=0.8",
        "algorithm.adv_estimator=rloo",
        "actor.band_scaling=length",
        "actor.band_reference_length=20",
        "actor.seq_tis_imp_ratio_cap=1.1",
        "actor.mismatch_outside_cap=drop",
    ],
    "grpo-token_mean-kl-bf16_masters": [
        "quant.scheme=w8a8",
        "quant.align=off",
        "optim.master_dtype=bf16",
        "optim.lr=1e-3",
        "optim.weight_decay=0.2",
        "actor.loss=grpo",
        "actor.loss_agg_mode=token-mean",
        "actor.clip_ratio_low=0.05",
        "actor.clip_ratio_high=0.1",
        "actor.use_kl_loss=true",
        "actor.kl_loss_coef=0.3",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "rollout_correction.rollout_is=token",
        "rollout_correction.rollout_is_threshold=1.1",
    ],
    "tbpo-w4a16-cosine": [
        "quant.scheme=w4a16",
        "quant.group_size=32",
        "optim.lr=1e-3",
        "optim.lr_scheduler_type=cosine",
        "optim.min_lr_ratio=0.2",
        "actor.ppo_mini_batch_size=4",
        "actor.ppo_epochs=2",
    ],
    "grpo-fp8-off": [
        "quant.scheme=fp8",
        "quant.align=off",
        "optim.lr=1e-3",
        "actor.loss=grpo",
        "data.shuffle=false",
    ],
    "dual_clip-dr_grpo-dynamic": [
        "quant.scheme=bf16",
        "optim.lr=3e-3",
        "actor.loss=dual_clip",
        "actor.clip_ratio_c=1.1",
        "actor.ppo_epochs=2",
        "actor.grad_clip=0.05",
        "algorithm.adv_estimator=dr_grpo",
        "actor.use_dynamic_bsz=true",
        "actor.ppo_max_token_len_per_gpu=40",
        "rollout_correction.rollout_is=geometric",
        "rollout_correction.rollout_is_mode=clip",
        "rollout_correction.rollout_is_threshold=1.03",
        "rollout_correction.rollout_is_batch_normalize=true",
    ],
    "gspo-rejection-fp16": [
        "quant.scheme=bf16",
        "model.dtype=fp16",
        "optim.lr=1e-3",
        "actor.loss=gspo",
        "actor.clip_ratio_low=0.01",
        "actor.clip_ratio_high=0.02",
        "rollout_correction.rollout_rs=[seq_mean_k3]",
        "rollout_correction.rollout_rs_threshold=0.01",
        "rollout_correction.veto_threshold=1e-5",
    ],
    "mis_gspo-lora": [
        "quant.scheme=w8a8",
        "lora.r=8",
        "lora.alpha=32",
        "optim.lr=3e-3",
        "actor.loss=mis_gspo",
        "actor.mis_imp_ratio_cap=1.2",
        "actor.clip_ratio_low=0.01",
        "actor.clip_ratio_high=0.02",
    ],
    "positive_only-bypass": [
        "quant.scheme=bf16",
        "optim.lr=1e-3",
        "actor.loss=positive_only",
        "actor.loss_agg_mode=seq-mean-token-sum",
        "rollout_correction.bypass_mode=true",
        "rollout_correction.rollout_rs=[token_k1,token_k2]",
        "rollout_correction.rollout_rs_threshold=[0.15,0.02]",
        "rollout_correction.rollout_rs_ratio=ppo",
    ],
    "sapo-padded": [
        "quant.scheme=bf16",
        "model.use_remove_padding=false",
        "optim.lr=1e-3",
        "actor.loss=sapo",
        "actor.tau_pos=0.7",
        "actor.tau_neg=2.0",
        "actor.old_log_probs=rollout",
    ],
    "sapo-w8a8-three_updates": [
        "quant.scheme=w8a8",
        "optim.lr=1e-2",
        "optim.lr_warmup_steps=0",
        "actor.loss=sapo",
        "actor.ppo_mini_batch_size=4",
        "actor.ppo_epochs=3",
    ],
    "reinforce-sequence-muon_bf16": [
        "quant.scheme=bf16",
        "optim.name=muon",
        "optim.master_dtype=bf16",
        "optim.lr=1e-3",
        "optim.weight_decay=0.2",
        "actor.loss=reinforce",
        "rollout_correction.rollout_is=sequence",
        "rollout_correction.rollout_is_mode=icepop",
        "rollout_correction.rollout_is_threshold=1.3",
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose distributions are far from uniform."""
    return save_random_model(tmp_path_factory.mktemp("twin") / "model", initializer_range=0.12)


@pytest.fixture(scope="module")
def experts_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts in which every token goes to all of them: with a choice, the rounding of the router would
    send some tokens elsewhere, which is no small error."""
    folder = tmp_path_factory.mktemp("twin") / "experts"
    every = {"num_experts": 4, "num_experts_per_tok": 4, "initializer_range": 0.12}
    return save_random_model(folder, "qwen3_moe", **every)


NEEDS = {"tbpo-w4a16-cosine": needs_w4a16_cpu}
PARAMETERS = [pytest.param(row, marks=NEEDS.get(row, ())) for row in ROWS]


@pytest.mark.parametrize("row", PARAMETERS)
def test_two_steps_are_those_of_the_twin(row: str, model: Path, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, model, *ROWS[row])
    follow(recorded_trainer(settings), 2)


def test_two_steps_of_experts_are_those_of_the_twin(experts_model: Path, tmp_path: Path) -> None:
    """Their stacks, the routing weights, and the router's own gradient."""
    keys = ["quant.scheme=bf16", "optim.lr=1e-3", "optim.weight_decay=0.1", "actor.loss=grpo"]
    follow(recorded_trainer(settings_for(tmp_path, experts_model, *keys)), 2)


@pytest.mark.parametrize("row", ["tbpo-grpo-w8a8-adamw", "gspo-rejection-fp16"])
def test_a_resume_takes_the_twins_next_step(row: str, model: Path, tmp_path: Path) -> None:
    """Two steps, a checkpoint, and two more of a new trainer and of the old one: both are the twin's, and equal."""
    settings = settings_for(tmp_path, model, *ROWS[row])
    first = recorded_trainer(settings)
    twin = follow(first, 2)
    second = resumed(first)
    for _ in range(2):
        alone = first.train_step()
        again = second.train_step()
        assert again.prompts == alone.prompts
        assert again.seeds == alone.seeds
        same(again.sent, alone.sent)
        assert again.metrics == {
            name: again.metrics[name] if name.startswith(MEASURED) else value
            for name, value in alone.metrics.items()
        }
        twin.check(again)
