#!/bin/bash
# The quickstart as a verl user starts it: verl's entry point, verl's keys, and of QaRL the installed package alone.
# On a CPU. More keys go behind: scripts/verl_command_line.sh trainer.total_training_steps=5
set -e
export VERL_PLATFORM=cpu RAY_worker_niceness=0 TORCHDYNAMO_DISABLE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
export VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_ATTN_SPLIT_KV=0 VLLM_CPU_INT4_W4A8=0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec "${PYTHON:-python}" -m verl.trainer.main_ppo \
    'hydra.searchpath=[pkg://qarl.verl]' +qarl=w4a16 +qarl_machine=cpu \
    hydra.run.dir=runs/verl_command_line hydra.output_subdir=null \
    actor_rollout_ref.model.path="$PWD/models/tiny-qwen3" \
    data.train_files="$PWD/data/column_addition/train.parquet" \
    data.val_files="$PWD/data/column_addition/test.parquet" \
    data.train_batch_size=12 data.max_prompt_length=32 data.max_response_length=80 data.val_max_samples=256 \
    reward.custom_reward_function.path=pkg://qarl.data.rewards reward.custom_reward_function.name=arithmetic \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.max_model_len=112 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=48 \
    actor_rollout_ref.actor.ppo_mini_batch_size=6 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=24 \
    actor_rollout_ref.actor.policy_loss.loss_mode=tbpo \
    actor_rollout_ref.actor.policy_loss.seq_clip_ratio_high=0.01 \
    actor_rollout_ref.actor.policy_loss.neg_seq_clip_ratio_low=0.008 \
    actor_rollout_ref.actor.policy_loss.neg_seq_clip_ratio_high=0.015 \
    actor_rollout_ref.actor.fsdp_config.quant.group_size=32 \
    actor_rollout_ref.actor.optim.lr=1.5e-4 actor_rollout_ref.actor.optim.weight_decay=0 \
    trainer.n_gpus_per_node=1 trainer.logger='[console,file]' trainer.resume_mode=disable \
    trainer.total_training_steps=120 trainer.test_freq=40 "$@"
