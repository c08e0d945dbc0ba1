"""The names of verl's keys that errors quote, and those of QaRL's keys that set them.

This module imports neither verl nor the rest of the backend, so every module of it may name a key.
"""

from __future__ import annotations

from qarl.config.multi_turn import MultiTurnConfig

PLUGIN = "qarl.verl"
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
AGENT = f"{ROLLOUT}.agent"
LOOP = f"{AGENT}.default_agent_loop"
MULTI_TURN = f"{ROLLOUT}.multi_turn"
FILES = (
    f"{AGENT}.agent_loop_config_path",
    f"{MULTI_TURN}.function_tool_path",
    f"{MULTI_TURN}.tool_config_path",
)
"""Keys that name files, which Ray's workers open in other folders."""
STOPS = f"{ROLLOUT}.custom"
"""verl's section for keys that it does not have, with QaRL's `stop` and `stop_token_ids`."""
REFERENCE = "actor_rollout_ref.ref"
SEPARATE = "trainer.v1.separate_async"
SEPARATE_MODE = "qarl_separate_async"
"""The value of `trainer.v1.trainer_mode` of QaRL's trainer with engines of their own."""
SAMPLER = "trainer.v1.sampler"
CORRECTION = "algorithm.rollout_correction"
POLICY_LOSS = f"{ACTOR}.policy_loss"
SHARDS = f"{ACTOR}.fsdp_config"
QUANT = f"{SHARDS}.quant"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
OVERRIDES = f"{VLLM}.hf_overrides"
RECEIVER = f"{VLLM}.worker_extension_cls"

LOSS_MODES = ("tbpo", "qarl")
"""The values of `policy_loss.loss_mode` that `qarl.verl.loss` registers."""
OWN_KEYS = {
    f"{MODEL}.path": "model.path",
    f"{MODEL}.hf_config_path": "model.path",
    f"{MODEL}.tokenizer_path": "model.path",
    "data.train_files": "data.train_files",
    "data.val_files": "data.val_files",
    "data.apply_chat_template_kwargs": "data.apply_chat_template_kwargs",
    "data.train_batch_size": "data.train_batch_size",
    "data.max_prompt_length": "data.max_prompt_length",
    "data.max_response_length": "data.max_response_length",
    f"{ROLLOUT}.n": "rollout.n",
    "trainer.n_gpus_per_node": "trainer.n_gpus_per_node",
    "trainer.nnodes": "trainer.nnodes",
    f"{SEPARATE}.num_warmup_batches": "trainer.staleness",
    f"{SEPARATE}.parameter_sync_step": "actor.ppo_mini_batch_size",
    f"{SAMPLER}.max_off_policy_threshold": "trainer.staleness",
    f"{SAMPLER}.max_off_policy_strategy": "trainer.staleness_strategy",
    f"{ROLLOUT}.n_gpus_per_node": "rollout.n_gpus_per_node",
    "actor_rollout_ref.hybrid_engine": "trainer.staleness",
    f"{ROLLOUT}.checkpoint_engine.backend": "trainer.staleness",
    "trainer.test_freq": "trainer.test_freq",
    "trainer.val_before_train": "trainer.val_before_train",
    "trainer.total_training_steps": "trainer.total_training_steps",
    "trainer.total_epochs": "trainer.total_training_steps",
    "trainer.resume_mode": "trainer.resume_mode",
    "trainer.resume_from_path": "trainer.resume_from_path",
    f"{ROLLOUT}.tensor_model_parallel_size": "rollout.tensor_model_parallel_size",
    f"{STOPS}.stop": "rollout.stop",
    f"{STOPS}.stop_token_ids": "rollout.stop_token_ids",
    f"{SHARDS}.model_dtype": "optim.master_dtype",
    f"{ACTOR}.optim.optimizer": "optim.name",
    f"{ACTOR}.optim.optimizer_impl": "optim.name",
    "reward.custom_reward_function.path": "reward.function",
    "reward.custom_reward_function.name": "reward.function",
}
"""verl's keys that the section `verl` may not set, nor keys below them, each with QaRL's key to set instead. QaRL reads
only its own to check model, data, reward and lengths, to estimate memory, to choose the checkpoint, and to decide
whether the run is finished and what is evaluated."""
BATCH_KEYS = {
    f"{ACTOR}.ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "actor.ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.ppo_max_token_len_per_gpu": "actor.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "actor.log_prob_micro_batch_size_per_gpu",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": "actor.log_prob_max_token_len_per_gpu",
}
"""verl's batch sizes that QaRL's config sets, and QaRL's names for them."""


def environment_keys() -> dict[str, str]:
    """Return the keys of verl that a run with `rollout.environment` may not set in the section `verl` either.

    verl's own agent loops read them, and QaRL's loop reads the section `multi_turn`."""
    own = {f"{MULTI_TURN}.{name}": f"multi_turn.{name}" for name in MultiTurnConfig.model_fields}
    return own | {
        LOOP: "rollout.environment to null, because the two exclude each other, or do not set this key"
    }
