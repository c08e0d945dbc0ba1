"""What keys of verl, TRL and OpenRLHF are called in QaRL's config.

Many of these keys have no similar name here, so a guess by spelling would name the wrong key. Each line of a table is
their key, QaRL's key, and a sentence on what differs. verl's keys are found with and without the section
`actor_rollout_ref`. TRL's and OpenRLHF's are flat, and are found in whichever section they were written. Keys that have
the same section and name here are not listed. Names are those of verl 0.9.1, TRL 1.16 and OpenRLHF 0.9.
"""

from __future__ import annotations

from typing import NamedTuple

VERL = """
data.truncation | data.filter_overlong_prompts | No prompt is truncated: one that is too long is an error or left out.
data.filter_overlong_prompts_workers | data.filter_overlong_prompts | One process reads the prompts.
data.gen_batch_size | data.train_batch_size | Each step generates for exactly this number of prompts.
data.val_batch_size | trainer.val_max_prompts | An evaluation is one batch; this limits its prompts.
data.val_max_samples | trainer.val_max_prompts | It counts prompts, not responses.
data.train_max_samples | trainer.total_training_steps | A run uses steps * data.train_batch_size prompts.
data.seed | seed | One seed decides data order, sampling and initialisation.
data.tokenizer | model.path | The tokenizer is the one in the model's folder.
actor.optim.lr | optim.lr | The optimizer is a section of its own.
actor.optim.weight_decay | optim.weight_decay | The optimizer is a section of its own.
actor.optim.betas | optim.betas | The optimizer is a section of its own.
actor.optim.lr_warmup_steps | optim.lr_warmup_steps | The optimizer is a section of its own.
actor.optim.lr_warmup_steps_ratio | optim.lr_warmup_steps | The warm-up is a number of steps, not a share of the run.
actor.optim.total_training_steps | trainer.total_training_steps | The schedule is as long as the run.
actor.optim.lr_scheduler_type | optim.lr_scheduler_type | The optimizer is a section of its own.
actor.optim.warmup_style | optim.lr_scheduler_type | It is constant or cosine.
actor.optim.min_lr_ratio | optim.min_lr_ratio | The optimizer is a section of its own.
actor.optim.clip_grad | actor.grad_clip | It is the largest norm of a gradient.
actor.optim.optimizer | optim.name | It is adamw or muon.
actor.fsdp_config.model_dtype | optim.master_dtype | It is fp32 or bf16.
actor.policy_loss.loss_mode | actor.loss | verl's vanilla is dual_clip; without the third ratio it is grpo.
actor.clip_ratio | actor.clip_ratio_low | The upper side is actor.clip_ratio_high.
actor.kl_loss_type | actor.kl_loss_coef | The KL term is always verl's low_var_kl+.
actor.ppo_micro_batch_size | actor.ppo_micro_batch_size_per_gpu | Micro-batches are counted on each GPU.
actor.loss_scale_factor | data.max_response_length | seq-mean-token-sum-norm divides by it.
model.enable_gradient_checkpointing | model.gradient_checkpointing | It has a shorter name.
model.lora_rank | lora.r | Adapters are a section of their own.
model.lora_alpha | lora.alpha | Adapters are a section of their own.
model.target_modules | lora.target_modules | Adapters are a section of their own.
model.tokenizer_path | model.path | The tokenizer is the one in the model's folder.
rollout.prompt_length | data.max_prompt_length | The engine takes it from there.
rollout.response_length | data.max_response_length | The engine takes it from there.
rollout.max_model_len | data.max_response_length | The engine's limit is data.max_prompt_length plus this.
rollout.dtype | model.dtype | Trainer and engine have the same dtype.
rollout.quantization | quant.scheme | It decides for trainer and engine.
rollout.name | backend | The engine is always vLLM; backend chooses the trainer around it.
rollout.log_prob_micro_batch_size | actor.log_prob_micro_batch_size_per_gpu | Micro-batches are counted on each GPU.
rollout.log_prob_micro_batch_size_per_gpu | actor.log_prob_micro_batch_size_per_gpu | The trainer computes them.
rollout.log_prob_max_token_len_per_gpu | actor.log_prob_max_token_len_per_gpu | The trainer computes them.
rollout.log_prob_use_dynamic_bsz | actor.use_dynamic_bsz | One key decides for the update, too.
rollout.calculate_log_probs | actor.old_log_probs | The engine always returns them; this says who uses them.
algorithm.filter_groups.enable | filter_groups.enable | Groups are compared by their rewards.
algorithm.filter_groups.metric | filter_groups.enable | Groups are compared by their rewards.
algorithm.filter_groups.max_num_gen_batches | filter_groups.max_num_gen_batches | It is at least 1.
rollout.val_kwargs.n | rollout.val_n | The column __rollout_n__ of a row wins.
rollout.val_kwargs.temperature | rollout.val_temperature | 0 is greedy.
rollout.val_kwargs.do_sample | rollout.val_temperature | 0 is greedy.
rollout.val_kwargs.top_p | rollout.val_temperature | Evaluations sample from all tokens.
rollout.val_kwargs.top_k | rollout.val_temperature | Evaluations sample from all tokens.
algorithm.use_kl_in_reward | actor.use_kl_loss | The KL is a term of the loss, not of the reward.
algorithm.kl_ctrl.kl_coef | actor.kl_loss_coef | The KL is a term of the loss, not of the reward.
algorithm.kl_penalty | actor.use_kl_loss | The KL is a term of the loss, not of the reward.
algorithm.gamma | algorithm.adv_estimator | There is no critic: a response has one advantage.
algorithm.lam | algorithm.adv_estimator | There is no critic: a response has one advantage.
algorithm.rollout_is | rollout_correction.rollout_is | Corrections are a section of their own.
algorithm.rollout_is_threshold | rollout_correction.rollout_is_threshold | Corrections are a section of their own.
algorithm.rollout_correction.rollout_is | rollout_correction.rollout_is | Corrections are a section of their own.
algorithm.rollout_correction.rollout_is_threshold | rollout_correction.rollout_is_threshold | It has the same meaning.
algorithm.rollout_correction.rollout_rs | rollout_correction.rollout_rs | Corrections are a section of their own.
algorithm.rollout_correction.rollout_rs_threshold | rollout_correction.rollout_rs_threshold | It has the same meaning.
algorithm.rollout_correction.bypass_mode | rollout_correction.bypass_mode | Corrections are a section of their own.
trainer.total_epochs | trainer.total_training_steps | A run is counted in steps, not in epochs.
trainer.experiment_name | name | It also names the folder of the run.
trainer.project_name | name | It also names the folder of the run.
trainer.default_local_dir | output_dir | The run writes to output_dir/name.
trainer.max_actor_ckpt_to_keep | trainer.max_ckpt_to_keep | It counts whole checkpoints.
trainer.log_val_generations | trainer.report | The report shows responses of training.
reward.reward_kwargs.overlong_buffer_cfg.len | reward.overlong_buffer_len | It is in tokens.
reward.reward_kwargs.overlong_buffer_cfg.penalty_factor | reward.overlong_penalty_factor | It has the same meaning.
custom_reward_function.path | reward.function | It is written path/to/file.py:function.
custom_reward_function.name | reward.function | It is written path/to/file.py:function.
reward.custom_reward_function.path | reward.function | It is written path/to/file.py:function.
reward.custom_reward_function.name | reward.function | It is written path/to/file.py:function.
"""
FLAT = """
num_generations | rollout.n | It is the number of responses to a prompt.
max_completion_length | data.max_response_length | It is in tokens.
per_device_train_batch_size | actor.ppo_micro_batch_size_per_gpu | It counts responses.
gradient_accumulation_steps | actor.ppo_mini_batch_size | It counts the prompts of an update.
generation_batch_size | data.train_batch_size | It counts prompts, not responses.
steps_per_generation | actor.ppo_mini_batch_size | data.train_batch_size is divided by it.
num_iterations | actor.ppo_epochs | It is how often a step goes over its batch.
beta | actor.kl_loss_coef | It needs actor.use_kl_loss=true.
epsilon | actor.clip_ratio_low | The upper side is actor.clip_ratio_high.
epsilon_high | actor.clip_ratio_high | The lower side is actor.clip_ratio_low.
delta | actor.clip_ratio_c | It needs actor.loss=dual_clip.
loss_type | actor.loss | Its mean is actor.loss_agg_mode.
scale_rewards | algorithm.norm_adv_by_std_in_grpo | It is true or false.
importance_sampling_level | actor.loss | gspo has one ratio for a response.
vllm_importance_sampling_correction | rollout_correction.rollout_is | TBPO needs none.
vllm_importance_sampling_cap | rollout_correction.rollout_is_threshold | TBPO needs none.
vllm_gpu_memory_utilization | rollout.gpu_memory_utilization | It is vLLM's share of a GPU.
vllm_tensor_parallel_size | rollout.tensor_model_parallel_size | It needs backend=verl.
vllm_enable_sleep | rollout.free_cache_engine | vLLM sleeps while the trainer works.
vllm_enable_sleep_mode | rollout.free_cache_engine | vLLM sleeps while the trainer works.
learning_rate | optim.lr | It is AdamW's peak rate.
adam_beta1 | optim.betas | It is a list of two numbers.
adam_beta2 | optim.betas | It is a list of two numbers.
adam_epsilon | optim.eps | It is AdamW's epsilon.
warmup_steps | optim.lr_warmup_steps | It is a number of training steps.
warmup_ratio | optim.lr_warmup_steps | The warm-up is a number of steps, not a share of the run.
max_grad_norm | actor.grad_clip | It is the largest norm of a gradient.
max_steps | trainer.total_training_steps | A step is one rollout, not one update.
num_train_epochs | trainer.total_training_steps | A run is counted in steps, not in epochs.
save_steps | trainer.save_freq | Checkpoints are also written every trainer.save_minutes.
save_total_limit | trainer.max_ckpt_to_keep | null keeps all.
eval_steps | trainer.test_freq | An evaluation follows the last step, too.
report_to | trainer.logger | It is a list of console, tensorboard and wandb.
run_name | name | It also names the folder of the run.
resume_from_checkpoint | trainer.resume_mode | A run resumes by itself if its name is unchanged.
bf16 | model.dtype | The model is always BF16, or FP16 without quantization.
generation_kwargs | rollout.stop | The section rollout has stop, stop_token_ids and min_tokens.
max_new_tokens | data.max_response_length | It is in tokens.
min_new_tokens | rollout.min_tokens | It is in tokens.
model_name_or_path | model.path | It is a folder or a name on the Hub.
pretrain | model.path | It is a folder or a name on the Hub.
prompt_data | data.train_files | It is a list of files in verl's schema.
eval_dataset | data.val_files | It is a list of files in verl's schema.
mask_truncated_completions | actor.mask_truncated_responses | Its reward still counts in the mean of its group.
chat_template_kwargs | data.apply_chat_template_kwargs | Each name must be one of the template's variables.
input_key | data.prompt_key | It names the column of the prompt.
prompt_max_len | data.max_prompt_length | It is in tokens.
generate_max_len | data.max_response_length | It is in tokens.
n_samples_per_prompt | rollout.n | It is the number of responses to a prompt.
rollout_batch_size | data.train_batch_size | It counts prompts, not responses.
micro_train_batch_size | actor.ppo_micro_batch_size_per_gpu | It counts responses.
micro_rollout_batch_size | actor.log_prob_micro_batch_size_per_gpu | It counts responses.
max_epochs | actor.ppo_epochs | It is how often a step goes over its batch.
num_episodes | trainer.total_training_steps | A run is counted in steps, not in epochs.
actor_learning_rate | optim.lr | It is AdamW's peak rate.
lr_warmup_ratio | optim.lr_warmup_steps | The warm-up is a number of steps, not a share of the run.
init_kl_coef | actor.kl_loss_coef | It needs actor.use_kl_loss=true.
eps_clip | actor.clip_ratio_low | The upper side is actor.clip_ratio_high.
eps_clip_low_high | actor.clip_ratio_low | The upper side is actor.clip_ratio_high.
advantage_estimator | algorithm.adv_estimator | There is no critic: it is grpo, rloo or dr_grpo.
remote_rm_url | reward.function | Write a function that asks the server, as examples/judge.py does.
reward_funcs | reward.functions | Each entry has a function, a weight and a name.
reward_weights | reward.functions | Each entry has a function, a weight and a name.
packing_samples | model.use_remove_padding | Rows are packed unless it is false.
lora_rank | lora.r | Adapters are a section of their own.
lora_alpha | lora.alpha | Adapters are a section of their own.
vllm_num_engines | rollout.tensor_model_parallel_size | One engine runs on that number of GPUs.
save_path | output_dir | The run writes to output_dir/name.
ckpt_path | output_dir | Checkpoints are in output_dir/name/checkpoints.
max_norm | actor.grad_clip | It is the largest norm of a gradient.
"""


class Counterpart(NamedTuple):
    """QaRL's `key` in place of another library's, and a sentence that says what differs."""

    key: str
    sentence: str


def _read(table: str) -> dict[str, Counterpart]:
    rows = [line.split(" | ") for line in table.strip().splitlines()]
    return {other: Counterpart(ours, sentence) for other, ours, sentence in rows}


_VERL = _read(VERL)
_FLAT = _read(FLAT)


def counterpart(key: str) -> Counterpart | None:
    """Return what QaRL has in place of another library's dotted `key`, or None if no table lists it."""
    plain = key.removeprefix("+").removeprefix("actor_rollout_ref.")
    return _VERL.get(plain) or _FLAT.get(plain.rpartition(".")[2])
