#!/bin/bash
# Each half of QaRL by itself from verl's command line, on a CPU, two steps each: the TBPO loss on verl's BF16 actor, and
# the quantized actor with verl's own loss. Metrics go to runs/verl_halves/{tbpo,quantized}.jsonl. `HALVES=tbpo` runs one.
set -e
export VERL_PLATFORM=cpu TORCHDYNAMO_DISABLE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
export VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_ATTN_SPLIT_KV=0 VLLM_CPU_INT4_W4A8=0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
folder="${FOLDER:-$PWD/runs/verl_halves}"
mkdir -p "$folder"

half() {
    name=$1
    shift
    [[ " ${HALVES:-tbpo quantized} " == *" $name "* ]] || return 0
    rm -f "$folder/$name.jsonl"
    VERL_FILE_LOGGER_PATH="$folder/$name.jsonl" "${PYTHON:-python}" -m verl.trainer.main_ppo \
        'hydra.searchpath=[pkg://qarl.verl]' "$@" \
        hydra.run.dir="$folder" hydra.output_subdir=null \
        actor_rollout_ref.model.path="$PWD/models/tiny-qwen3" \
        data.train_files="$PWD/data/column_addition/train.parquet" \
        data.val_files="$PWD/data/column_addition/test.parquet" \
        data.train_batch_size=12 data.max_prompt_length=32 data.max_response_length=80 \
        reward.custom_reward_function.path=pkg://qarl.data.rewards reward.custom_reward_function.name=arithmetic \
        algorithm.adv_estimator=grpo \
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
        actor_rollout_ref.rollout.max_model_len=112 \
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=48 \
        actor_rollout_ref.actor.ppo_mini_batch_size=6 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=24 \
        actor_rollout_ref.actor.optim.lr=1.5e-4 \
        trainer.n_gpus_per_node=1 trainer.logger='[console,file]' trainer.resume_mode=disable \
        trainer.total_training_steps=2 trainer.val_before_train=False trainer.test_freq=-1
}

half tbpo +qarl_machine=cpu \
    actor_rollout_ref.actor.policy_loss.loss_mode=tbpo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.rollout.calculate_log_probs=True
half quantized +qarl=w4a16 +qarl_machine=cpu \
    actor_rollout_ref.actor.policy_loss.loss_mode=vanilla actor_rollout_ref.actor.fsdp_config.quant.group_size=32
