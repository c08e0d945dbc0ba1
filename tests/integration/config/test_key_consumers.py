"""Every key of the config is read by its consumer, in both backends. tests/integration/trl_backend/test_trl_keys.py
does TRL's.

The local backend runs with a rollout engine that only answers, and the reads of each key are traced to files of the
package. verl reads its own config, so there another value of a key must change the named key of verl's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from key_reads import AnsweringEngine, leaves, traced
from pefts_adapters import save_pefts
from verl_runs import quickstart

from qarl import train
from qarl.config import ConfigError
from qarl.config.multi_turn import MultiTurnConfig
from qarl.errors import UserError
from qarl.kernels.cuda import whole_sums
from qarl.trainer import local
from qarl.verl.checks import refuse_unsupported
from qarl.verl.environment import worker_environment
from qarl.verl.run import verl_keys

pytestmark = [pytest.mark.long, pytest.mark.verl]

NO_CONSUMERS = (
    "config/checks.py",
    "config/__init__.py",
    "checks/memory_parts.py",
    "checks/weight_memory.py",
    "checks/activation_memory.py",
    "checks/engine_memory.py",
)
"""Files that read keys only to check them."""
NOT_LOCAL: dict[str, Any] = {
    "verl": {"trainer.val_only": True},
    "rollout.tensor_model_parallel_size": 2,
    "trainer.nnodes": 2,
    "trainer.n_gpus_per_node": 2,
}
GRPO = [
    "name=grpo", "actor.loss=grpo", "actor.use_kl_loss=true", "actor.use_dynamic_bsz=true",
    "actor.ppo_micro_batch_size_per_gpu=null", "actor.log_prob_micro_batch_size_per_gpu=null",
    "actor.ppo_max_token_len_per_gpu=500", "rollout_correction.rollout_is=geometric",
    "rollout_correction.rollout_is_mode=clip", "rollout_correction.rollout_rs=[seq_mean_k1]",
    "rollout_correction.rollout_rs_threshold=[9]", "rollout_correction.veto_threshold=1e-9", "optim.name=muon",
    "optim.lr_scheduler_type=cosine", "rollout.rebuild_on_failure=true", "trainer.save_freq=1",
    "trainer.total_training_steps=2", "trainer.test_freq=1", "trainer.save_best=true",
]  # fmt: skip
RUNS = (
    ["actor.old_log_probs=auto"],
    ["actor.loss=mis_gspo", "name=mis_gspo"],
    ["name=lora", "lora.r=8", "lora.alpha=16", "lora.target_modules=[q_proj]"],
    ["name=begun", "lora.path=adapter"],
    [
        "name=turns",
        f"rollout.environment={ROOT}/tests/support/turn_environments.py:three_sums",
        "reward.function=environment",
    ],
    [
        "name=filter",
        "filter_groups.enable=true",
        "filter_groups.max_num_gen_batches=2",
        "reward.overlong_buffer_len=2",
        "reward.overlong_penalty_factor=0.5",
        "actor.mask_truncated_responses=true",
        "rollout.val_temperature=0.5",
        "rollout.val_n=2",
        "rollout.stop=x",
        "rollout.stop_token_ids=[1]",
        "rollout.min_tokens=1",
    ],
    GRPO,
    [
        *GRPO,
        "trainer.resume_mode=resume_path",
        "trainer.resume_from_path=runs/grpo/checkpoints/step_1",
    ],
)
"""Together they read every key."""


def test_the_local_backend_reads_every_key(
    startable_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RolloutEngine", "RecoveringEngine"):
        monkeypatch.setattr(local, name, AnsweringEngine)
    # The log-probs of the engine are made up, so no limit may stop the run.
    base = [
        "config=run.yaml",
        "quant.scheme=bf16",
        "quant.align=linears",
        "quant.mismatch_limit=100",
    ]
    save_pefts(Path("model"), Path("adapter"))
    with traced() as reads:
        for number, run in enumerate(RUNS):
            code = train.main([*base, "trainer.num_threads=1", *run])
            assert code == 0, (number, capsys.readouterr().err[-2000:])
    consumers = {
        key: {file for file in files if file not in NO_CONSUMERS} for key, files in reads.items()
    }
    assert leaves() - NOT_LOCAL.keys() - {key for key, files in consumers.items() if files} == set()
    for key, value in NOT_LOCAL.items():
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            quickstart(**{"backend": "local", key: value})


ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
LOSS, QUANT, OPTIM = f"{ACTOR}.policy_loss", f"{ACTOR}.fsdp_config.quant", f"{ACTOR}.optim"
ENGINE, MUON = f"{ROLLOUT}.engine_kwargs.vllm", f"{OPTIM}.override_optimizer_config"
CORRECTION = f"{LOSS}.correction"
SAMPLER = "trainer.v1.sampler"
TURNS, ASKED = f"{ROLLOUT}.multi_turn", {"rollout.environment": "tools.py:answer"}
GPU = {"trainer.n_gpus_per_node": 2}
TOKENS = {"actor.use_dynamic_bsz": True, "actor.ppo_max_token_len_per_gpu": 300} | {
    f"actor.{kind}_micro_batch_size_per_gpu": None for kind in ("ppo", "log_prob")
}
STALE = {"backend": "verl", "trainer.staleness": 1}
WEIGHT = {"actor.loss": "grpo", "rollout_correction.rollout_is": "token"}
REJECTION = {
    "rollout_correction.rollout_rs": ["seq_mean_k1"],
    "rollout_correction.rollout_rs_threshold": [0.5],
}
VERL: dict[str, tuple[Any, str] | tuple[Any, str, dict[str, Any]]] = {
    "name": ("other", "trainer.experiment_name"),
    "seed": (7, f"{ROLLOUT}.seed"),
    "output_dir": ("elsewhere", "trainer.default_local_dir"),
    "model.path": ("org/other", f"{MODEL}.path"),
    "model.trust_remote_code": (True, f"{MODEL}.trust_remote_code"),
    "model.head_dtype": ("fp32", f"{QUANT}.head_dtype"),
    "quant.kernels": ("qarl", f"{QUANT}.kernels", {"quant.scheme": "w8a8"}),
    "model.gradient_checkpointing": (True, f"{MODEL}.enable_gradient_checkpointing"),
    "lora.r": (8, f"{QUANT}.lora"),
    "lora.path": (str(ROOT / "tests/data/peft_adapter"), f"{QUANT}.lora"),
    "lora.alpha": (16, f"{QUANT}.lora", {"lora.r": 8}),
    "lora.target_modules": (["q_proj"], f"{QUANT}.lora", {"lora.r": 8}),
    "model.use_remove_padding": (False, f"{MODEL}.use_remove_padding"),
    "data.train_files": (["a.parquet"], "data.train_files"),
    "data.val_files": (["b.parquet"], "data.val_files"),
    "data.train_batch_size": (24, "data.train_batch_size"),
    "data.max_prompt_length": (33, "data.max_prompt_length"),
    "data.max_response_length": (81, "data.max_response_length"),
    "data.shuffle": (False, "data.shuffle"),
    "data.prompt_key": ("question", "data.prompt_key"),
    "data.filter_overlong_prompts": (True, "data.filter_overlong_prompts"),
    "data.apply_chat_template_kwargs": (
        {"enable_thinking": False}, "data.apply_chat_template_kwargs.enable_thinking",
    ),
    "reward.function": ("math_verify", "reward.custom_reward_function.reward_kwargs"),
    "reward.functions": (
        [{"function": "math_verify", "weight": 0.5}], "reward.custom_reward_function.reward_kwargs",
    ),
    "reward.timeout_s": (None, "reward.custom_reward_function.reward_kwargs"),
    "reward.keep_special_tokens": (True, "reward.reward_manager.name"),
    "reward.workers": (3, "reward.custom_reward_function.reward_kwargs"),
    "rollout.n": (4, f"{ROLLOUT}.n"),
    "rollout.temperature": (0.9, f"{ROLLOUT}.temperature"),
    "rollout.val_temperature": (0.5, f"{ROLLOUT}.val_kwargs.temperature"),
    "rollout.val_n": (4, f"{ROLLOUT}.val_kwargs.n", {"rollout.val_temperature": 0.6}),
    "rollout.stop": (["</answer>"], f"{ROLLOUT}.custom.stop"),
    "rollout.stop_token_ids": ([3], f"{ROLLOUT}.custom.stop_token_ids"),
    "rollout.max_num_seqs": (128, f"{ROLLOUT}.max_num_seqs"),
    "rollout.max_num_batched_tokens": (4096, f"{ROLLOUT}.max_num_batched_tokens"),
    "rollout.gpu_memory_utilization": (0.6, f"{ROLLOUT}.gpu_memory_utilization"),
    "rollout.cpu_kvcache_space_gib": (2.0, f"{ENGINE}.kv_cache_memory_bytes"),
    "rollout.enforce_eager": (True, f"{QUANT}.enforce_eager"),
    "rollout.enable_prefix_caching": (True, f"{ROLLOUT}.enable_prefix_caching"),
    "rollout.free_cache_engine": (False, f"{ROLLOUT}.free_cache_engine"),
    "rollout.tensor_model_parallel_size": (2, f"{QUANT}.tensor_model_parallel_size", GPU),
    "rollout.environment": ("tools.py:answer", f"{ROLLOUT}.agent.default_agent_loop"),
    "multi_turn.tool_response_truncate_side": ("left", f"{TURNS}.tool_response_truncate_side", ASKED),
    **{
        f"multi_turn.{name}": (3, f"{TURNS}.{name}", ASKED)
        for name in MultiTurnConfig.model_fields.keys() - {"tool_response_truncate_side"}
    },
    "rollout.router_replay": ("off", f"{QUANT}.router_replay"),
    "quant.scheme": ("fp8", f"{QUANT}.scheme"),
    "quant.group_size": (64, f"{ENGINE}.hf_overrides"),
    "quant.ignore": (["lm_head", "re:.*down_proj"], f"{QUANT}.ignore"),
    "quant.align": ("off", f"{QUANT}.align"),
    "quant.mismatch_limit": (0.25, f"{QUANT}.mismatch_limit"),
    "actor.loss": ("grpo", f"{LOSS}.objective"),
    "actor.loss_agg_mode": ("token-mean", f"{ACTOR}.loss_agg_mode", {"actor.loss": "grpo"}),
    "actor.clip_ratio_low": (0.1, f"{ACTOR}.clip_ratio_low", {"actor.loss": "grpo"}),
    "actor.clip_ratio_high": (0.1, f"{ACTOR}.clip_ratio_high", {"actor.loss": "grpo"}),
    "actor.clip_ratio_c": (4.0, f"{ACTOR}.clip_ratio_c", {"actor.loss": "dual_clip"}),
    "actor.tau_pos": (2.0, f"{ACTOR}.tau_pos", {"actor.loss": "sapo"}),
    "actor.tau_neg": (2.0, f"{ACTOR}.tau_neg", {"actor.loss": "sapo"}),
    "actor.mis_imp_ratio_cap": (3.0, f"{LOSS}.mis_imp_ratio_cap", {"actor.loss": "mis_gspo"}),
    "actor.ppo_mini_batch_size": (12, f"{ACTOR}.ppo_mini_batch_size"),
    "actor.use_dynamic_bsz": (True, f"{ACTOR}.use_dynamic_bsz", TOKENS),
    "actor.ppo_micro_batch_size_per_gpu": (12, f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    "actor.log_prob_micro_batch_size_per_gpu": (16, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    "actor.ppo_max_token_len_per_gpu": (400, f"{ACTOR}.ppo_max_token_len_per_gpu", TOKENS),
    "actor.log_prob_max_token_len_per_gpu": (400, f"{ROLLOUT}.log_prob_max_token_len_per_gpu", TOKENS),
    "actor.old_log_probs": ("recompute", f"{QUANT}.old_log_probs"),
    "actor.old_log_probs_sample": (0.5, f"{QUANT}.old_log_probs_sample", {"actor.old_log_probs": "auto"}),
    "actor.ppo_epochs": (2, f"{ACTOR}.ppo_epochs"),
    "actor.grad_clip": (0.5, f"{OPTIM}.clip_grad"),
    "actor.seq_clip_ratio_high": (0.51, f"{LOSS}.seq_clip_ratio_high"),
    "actor.seq_clip_ratio_low": (0.52, f"{LOSS}.seq_clip_ratio_low", {"actor.positive_band": "two_sided"}),
    "actor.neg_seq_clip_ratio_low": (0.53, f"{LOSS}.neg_seq_clip_ratio_low"),
    "actor.neg_seq_clip_ratio_high": (0.54, f"{LOSS}.neg_seq_clip_ratio_high"),
    "actor.seq_tis_imp_ratio_cap": (3.0, f"{LOSS}.seq_tis_imp_ratio_cap"),
    "actor.mismatch_outside_cap": ("drop", f"{LOSS}.mismatch_outside_cap"),
    "actor.positive_band": ("two_sided", f"{LOSS}.positive_band"),
    "actor.band_scaling": ("length", f"{LOSS}.band_scaling"),
    "actor.band_reference_length": (50, f"{LOSS}.band_reference_length", {"actor.band_scaling": "length"}),
    "algorithm.adv_estimator": ("rloo", "algorithm.adv_estimator"),
    "algorithm.norm_adv_by_std_in_grpo": (False, "algorithm.norm_adv_by_std_in_grpo"),
    "rollout_correction.bypass_mode": (True, CORRECTION, {"actor.loss": "grpo"}),
    "rollout_correction.rollout_is": ("token", CORRECTION, {"actor.loss": "grpo"}),
    "rollout_correction.rollout_is_mode": ("mask", CORRECTION, WEIGHT),
    "rollout_correction.rollout_is_threshold": (3.0, CORRECTION, WEIGHT),
    "rollout_correction.rollout_is_threshold_lower": (
        0.1, CORRECTION, WEIGHT | {"rollout_correction.rollout_is_mode": "clip"},
    ),
    "rollout_correction.rollout_is_batch_normalize": (True, CORRECTION, WEIGHT),
    "rollout_correction.rollout_rs": (["seq_max_k2"], CORRECTION, REJECTION),
    "rollout_correction.rollout_rs_threshold": ([0.7], CORRECTION, REJECTION),
    "rollout_correction.rollout_rs_threshold_lower": (-0.5, CORRECTION, REJECTION),
    "rollout_correction.rollout_rs_ratio": ("ppo", CORRECTION, REJECTION),
    "rollout_correction.veto_threshold": (1e-6, CORRECTION),
    "optim.name": ("muon", f"{OPTIM}.optimizer"),
    "optim.lr": (1e-3, f"{OPTIM}.lr"),
    "optim.betas": ([0.8, 0.9], f"{OPTIM}.betas"),
    "optim.eps": (1e-6, MUON),
    "optim.weight_decay": (0.1, f"{OPTIM}.weight_decay"),
    "optim.lr_warmup_steps": (3, f"{OPTIM}.lr_warmup_steps"),
    "optim.lr_scheduler_type": ("constant", f"{OPTIM}.lr_scheduler_type"),
    "optim.min_lr_ratio": (0.2, f"{OPTIM}.min_lr_ratio"),
    "optim.muon_lr": (3e-3, MUON, {"optim.name": "muon"}),
    "optim.muon_momentum": (0.8, MUON, {"optim.name": "muon"}),
    "optim.master_dtype": ("bf16", f"{ACTOR}.fsdp_config.model_dtype"),
    "trainer.nnodes": (2, "trainer.nnodes"),
    "trainer.n_gpus_per_node": (2, "trainer.n_gpus_per_node"),
    "trainer.staleness": (2, f"{QUANT}.staleness", {"backend": "verl"}),
    "trainer.staleness_strategy": ("drop", f"{SAMPLER}.max_off_policy_strategy", STALE),
    "rollout.n_gpus_per_node": (2, f"{ROLLOUT}.n_gpus_per_node", STALE),
    "trainer.total_training_steps": (60, "trainer.total_training_steps"),
    "trainer.test_freq": (30, "trainer.test_freq"),
    "trainer.val_before_train": (False, "trainer.val_before_train"),
    "trainer.val_max_prompts": (100, "data.val_max_samples"),
    "trainer.save_final": (False, "trainer.save_freq"),
    "trainer.save_freq": (10, "trainer.save_freq"),
    "trainer.save_minutes": (5.0, "trainer.save_minutes"),
    "trainer.max_ckpt_to_keep": (2, "trainer.max_actor_ckpt_to_keep"),
    "trainer.resume_mode": (
        "resume_path", "trainer.resume_mode", {"trainer.resume_from_path": "runs/x/checkpoints/global_step_1"},
    ),
    "trainer.resume_from_path": ("b", "trainer.resume_from_path", {"trainer.resume_mode": "resume_path"}),
}  # fmt: skip
"""Key -> another value, the key of verl's that changes with it, and other keys that it needs."""
NOT_VERL: dict[str, tuple[Any, dict[str, Any]]] = {
    "model.dtype": ("fp16", {}),
    "rollout.top_p": (0.8, {}),
    "rollout.top_k": (20, {}),
    "rollout.min_tokens": (4, {}),
    "rollout.rebuild_on_failure": (True, {}),
    "filter_groups.enable": (True, {}),
    "filter_groups.max_num_gen_batches": (3, {"filter_groups.enable": True}),
    "reward.overlong_buffer_len": (3, {}),
    "reward.overlong_penalty_factor": (0.5, {"reward.overlong_buffer_len": 3}),
    "actor.mask_truncated_responses": (True, {}),
    "trainer.save_best": (True, {"trainer.test_freq": 1}),
    "actor.use_kl_loss": (True, {}),
    "actor.kl_loss_coef": (2.0, {"actor.use_kl_loss": True}),
}
"""Key -> a value that backend=verl refuses, and other keys that it needs."""
BESIDE_VERL = {
    "verl": "qarl/verl/run.py",
    "backend": "qarl/train.py",
    "dry_run": "qarl/train.py",
    "plugins": "qarl/config/__init__.py",
    "reward.check_ground_truths": "qarl/checks/registry.py",
    "trainer.num_threads": "qarl/verl/config.py",
    "trainer.logger": "qarl/verl/followed_log.py",
    "trainer.plots": "qarl/verl/run.py",
    "trainer.progress": "qarl/verl/config.py",
    "trainer.report": "qarl/verl/run.py",
}
"""Keys that QaRL's own side of a verl run reads."""


def verls(changes: dict[str, Any]) -> dict[str, Any]:
    """verl's keys for the quickstart with these changes, on a CPU and on GPUs. Without them if they are not valid."""
    try:
        config = quickstart(**changes)
    except ConfigError:
        config = quickstart()
    keys = {}
    for on_cpu in (True, False):
        keys |= {
            f"{name.removeprefix('+')} {on_cpu}": value
            for name, value in verl_keys(config, on_cpu).items()
        }
    return keys


def test_verl_is_given_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert set(VERL) | set(NOT_VERL) | set(BESIDE_VERL) == leaves()
    lost = []
    for key, (value, theirs, *more) in VERL.items():
        others = more[0] if more else {}
        before, after = (
            verls({name: v for name, v in others.items() if name != key}),
            verls(others | {key: value}),
        )
        places = [f"{theirs} {on_cpu}" for on_cpu in (True, False)]
        if not any(place in after and after[place] != before.get(place) for place in places):
            lost.append((key, theirs))
    assert lost == []
    for key, (value, others) in NOT_VERL.items():
        with pytest.raises(UserError):
            refuse_unsupported(quickstart(**others | {key: value}))
    threads = {
        worker_environment(quickstart(**{"trainer.num_threads": n}), True)["OMP_NUM_THREADS"]
        for n in (1, 3)
    }
    assert threads == {"1", "3"}


@pytest.mark.parametrize("level", ["model", "exact"])
def test_exact_asks_cublas_for_whole_sums_in_every_process(level):
    config = quickstart(**{"quant.align": level})
    for on_cpu in (True, False):
        variables = worker_environment(config, on_cpu)
        asked = {name: variables.get(name) for name in whole_sums.VARIABLES}
        expected = whole_sums.VARIABLES if level == "exact" and not on_cpu else {}
        assert asked == dict.fromkeys(whole_sums.VARIABLES) | expected
