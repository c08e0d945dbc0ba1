"""verl's keys for a run of QaRL's config.

`verl_keys` is the only place that maps QaRL's keys to verl's, one function for each section of verl's config.
Statements here about verl were checked against the source of verl 0.9.1.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from qarl.align.router import replays
from qarl.checks.gpu_memory_decides import recomputes_activations, sequences_at_once
from qarl.checks.machine import UNKNOWN_GPU_BYTES, this_machine
from qarl.checks.model import applied_level
from qarl.checks.model_folder import hf_config_or_carried
from qarl.config import Config
from qarl.config.level import Level
from qarl.config.lora import LoraConfig
from qarl.config.objectives import get_objective
from qarl.config.optimizers import get_optimizer
from qarl.config.schema import BATCHED_TOKENS, sections
from qarl.errors import UserError
from qarl.lora.adapter import adapted_leaves
from qarl.lora.layers import target_linears
from qarl.objectives import verl_functions
from qarl.objectives.settings import SAME_IN_VERL, objective_settings
from qarl.quant.meta_model import meta_model
from qarl.rollout.adapter_spec import AdapterSpec
from qarl.rollout.engine_config import operator_arguments
from qarl.rollout.kernel_request import engine_arguments, kernel_request
from qarl.rollout.vllm_plugin import experts_of
from qarl.schemes import get_scheme
from qarl.tbpo.config import KEYS
from qarl.verl.environment import worker_environment
from qarl.verl.keys import CORRECTION, LOOP, MULTI_TURN, PLUGIN, STOPS
from qarl.verl.separate_keys import separate_keys
from qarl.vllm_versions import FP32_HEAD

Keys = dict[str, Any]
_ENGINE = {
    **dict.fromkeys(("scheme", "group_size", "ignore", "align", "kernels"), "quant"),
    "mismatch_limit": "quant",
    **dict.fromkeys(("router_replay", "tensor_model_parallel_size", "enforce_eager"), "rollout"),
    "head_dtype": "model",
    **dict.fromkeys(("old_log_probs", "old_log_probs_sample"), "actor"),
}
"""The settings that verl's actor worker needs, each with the section of QaRL's config."""


def fsdp_engine_fields() -> Keys:
    """Return the type and the default of each setting of `_ENGINE`, as `pydantic.create_model` takes them."""
    known = {name: sections()[section].model_fields[name] for name, section in _ENGINE.items()}
    fields: Keys = {name: (info.annotation, info) for name, info in known.items()}
    fields |= {"lora": (LoraConfig, LoraConfig())}
    return fields | {"enforce_eager": (bool, False)}  # null is resolved before it gets there


def fsdp_engine_settings(config: Config) -> Keys:
    """Return the settings of `_ENGINE`, for `actor_rollout_ref.actor.fsdp_config.quant`."""
    values = config.model_dump()
    settings = {name: values[section][name] for name, section in _ENGINE.items()}
    lora = values["lora"]
    if lora["path"]:  # Ray's workers start in other folders
        lora |= {"path": str(Path(lora["path"]).resolve())}
    return settings | {"enforce_eager": bool(config.rollout.enforce_eager), "lora": lora}


def verl_keys(config: Config, on_cpu: bool) -> Keys:
    """Return verl's dotted keys with their values for this run. `+` marks keys that verl's YAML does not list."""
    keys = {
        **data_keys(config),
        **reward_keys(config),
        **model_keys(config, on_cpu),
        **actor_keys(config),
        **optim_keys(config),
        **rollout_keys(config, on_cpu),
        **turn_keys(config),
        **routing_keys(config, on_cpu),
        **algorithm_keys(config),
        **trainer_keys(config),
        # Otherwise workers would have only the environment of Ray, which may have been started before this run.
        "+ray_kwargs.ray_init.runtime_env.env_vars": worker_environment(config, on_cpu),
    }
    return keys | (cpu_keys(config) if on_cpu else {}) | separate_keys(config, on_cpu)


def same(root: str, section: Any, *names: str) -> Keys:
    """Return {`root`.NAME: value} for those keys of our `section` that have the same names in verl (`names`)."""
    return {f"{root}.{name}": getattr(section, name) for name in names}


def data_keys(config: Config) -> Keys:
    data = config.data
    # verl wants validation files even if nothing is evaluated.
    limit = config.trainer.val_max_prompts or -1
    return {
        "data.train_files": [str(Path(file).resolve()) for file in data.train_files],
        "data.val_files": [
            str(Path(file).resolve()) for file in data.val_files or data.train_files
        ],
        "data.val_max_samples": limit if data.val_files else 1,
        **same("data", data, "train_batch_size", "max_prompt_length", "max_response_length"),
        **same("data", data, "shuffle", "prompt_key", "filter_overlong_prompts"),
        **{
            f"+data.apply_chat_template_kwargs.{name}": value
            for name, value in data.apply_chat_template_kwargs.items()
        },
        "data.seed": config.seed,
        "data.truncation": "error",
        "data.custom_cls.path": f"pkg://{PLUGIN}.dataset",
        "data.custom_cls.name": "QaRLDataset",
        "data.trust_remote_code": config.model.trust_remote_code,
    }


def reward_keys(config: Config) -> Keys:
    """Return keys that make verl call `qarl.verl.reward.score`, which calls `reward.function`."""
    root = "reward.custom_reward_function"
    manager = "reward.reward_manager"
    manager_keys = {}
    functions = [
        {"function": resolved_function(part.function), "weight": part.weight, "name": part.name}
        for part in config.reward.functions
    ]
    several = {"functions": functions} if functions else {}
    if config.reward.keep_special_tokens:
        manager_keys = {
            f"{manager}.source": "importlib",
            f"{manager}.module.path": f"pkg://{PLUGIN}.reward_manager",
            f"{manager}.name": "KeepSpecialTokens",
        }
    return {
        **manager_keys,
        f"{root}.path": f"pkg://{PLUGIN}.reward",
        f"{root}.name": "score",
        f"+{root}.reward_kwargs": {
            "function": resolved_function(config.reward.function),
            "timeout_s": config.reward.timeout_s,
            "workers": config.reward.workers,
            "folder": os.getcwd(),  # Ray's workers start in other folders
            **several,
        },
    }


def model_keys(config: Config, on_cpu: bool) -> Keys:
    model = "actor_rollout_ref.model"
    path = config.model.path
    return {
        # Workers start in other folders, so a folder is an absolute path. A name on the Hub stays as it is.
        f"{model}.path": str(Path(path).resolve()) if Path(path).is_dir() else path,
        **same(model, config.model, "trust_remote_code", "use_remove_padding"),
        f"{model}.enable_gradient_checkpointing": recomputes_activations(
            config, hf_config_of(config), **_gpu(on_cpu)
        ),
        f"+{model}.override_config.attention_dropout": 0.0,
        # verl's default, flash_attention_2, needs a package that neither lock has. `qarl.align.packed_attention`
        # replaces sdpa, on CUDA by PyTorch's own variable-length Flash Attention.
        f"+{model}.override_config.attn_implementation": "sdpa",
    }


def _gpu(on_cpu: bool) -> Keys:
    """Return what the functions of `gpu_memory_decides` ask of the machine. Without a GPU here, Ray's is not known."""
    memory = this_machine("verl").gpu_memory_bytes or UNKNOWN_GPU_BYTES
    return {"device": "cpu" if on_cpu else "cuda", "gpu_memory_bytes": 0 if on_cpu else memory}


def actor_keys(config: Config) -> Keys:
    actor = config.actor
    root = "actor_rollout_ref.actor"
    # null: verl's default, which for log-probs is the limit of the update
    limits = same(root, actor, "ppo_max_token_len_per_gpu")
    limits |= same("actor_rollout_ref.rollout", actor, "log_prob_max_token_len_per_gpu")
    return {
        f"{root}.strategy": "fsdp2",
        **same(root, actor, "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs"),
        **same(root, actor, "use_dynamic_bsz", "grad_clip"),
        **objective_keys(config),
        **{key: limit for key, limit in limits.items() if limit is not None},
        f"{root}.fsdp_config._target_": f"{PLUGIN}.config_classes.QuantFSDPEngineConfig",
        # A frozen base needs no masters; A and B are FP32 in any case.
        f"{root}.fsdp_config.model_dtype": "bf16" if config.lora.r else config.optim.master_dtype,
        f"{root}.fsdp_config.seed": config.seed,
        f"{root}.data_loader_seed": config.seed,
        **{
            f"+{root}.fsdp_config.quant.{name}": value
            for name, value in fsdp_engine_settings(config).items()
        },
    }


def objective_keys(config: Config) -> Keys:
    """Return the keys of the loss: `loss_mode`, verl's other keys, and those of `QaRLPolicyLossConfig`."""
    settings = objective_settings(config)
    root = "actor_rollout_ref.actor"
    ours = {name: getattr(config.actor, name) for name in (*KEYS, "mis_imp_ratio_cap")}
    ours |= {"objective": settings.loss, "correction": config.rollout_correction.model_dump()}
    keys = {
        f"{root}.loss_agg_mode": settings.loss_agg_mode,
        f"{root}.policy_loss._target_": f"{PLUGIN}.config_classes.QaRLPolicyLossConfig",
        f"{root}.policy_loss.loss_mode": "tbpo" if settings.loss == "tbpo" else "qarl",
        **{f"+{root}.policy_loss.{name}": value for name, value in ours.items()},
        # Used only if the section verl sets use_kl_loss. `+` selects k2's gradient, KL's own; k3's is biased.
        f"{root}.kl_loss_type": "low_var_kl+",
    }
    if settings.loss != "tbpo":
        keys |= same(root, settings, *SAME_IN_VERL, "loss_scale_factor")
    return keys


def algorithm_keys(config: Config) -> Keys:
    """Return the keys of the advantages, and of the weights that verl's trainer computes for the whole batch.

    The loss applies all other corrections. So it knows the number of responses before a rejection, and the mismatch
    metrics are over all responses.
    """
    algorithm = config.algorithm
    correction = config.rollout_correction
    whitens = get_objective(config.actor.loss).whitens_rewards
    estimator = "reinforce_plus_plus" if whitens else algorithm.adv_estimator
    keys: Keys = {
        "algorithm.adv_estimator": "grpo" if estimator == "dr_grpo" else estimator,
        "algorithm.norm_adv_by_std_in_grpo": estimator == "grpo"
        and algorithm.norm_adv_by_std_in_grpo,
        # If true, verl would use the rollout's log-probs as the trainer's, which would hide every mismatch.
        f"{CORRECTION}.bypass_mode": False,
    }
    if verl_functions.has_weight(correction):
        keys |= same(CORRECTION, correction, "rollout_is", "rollout_is_batch_normalize")
        keys[f"{CORRECTION}.rollout_is_threshold"] = verl_functions.weight_bounds(correction)
    return keys


def optim_keys(config: Config) -> Keys:
    """Return the optimizer's keys. AdamW with FP32 masters is verl's default, `torch.optim.AdamW`. Any other optimizer
    is built by the engine with the factory that these keys name (`qarl.config.optimizers`)."""
    optim = config.optim
    optimizer = get_optimizer(optim.name)
    root = "actor_rollout_ref.actor.optim"
    keys = {
        **same(
            root,
            optim,
            "lr",
            "weight_decay",
            "lr_warmup_steps",
            "lr_scheduler_type",
            "min_lr_ratio",
        ),
        f"{root}.betas": list(optim.betas),
        f"{root}.clip_grad": config.actor.grad_clip,
        f"{root}.override_optimizer_config": {"eps": optim.eps},
    }
    if optimizer.verl_builds_fp32 and optim.master_dtype == "fp32":
        return keys
    module, _, function = optimizer.factory.partition(":")
    arguments = {"eps": optim.eps, "seed": config.seed, **optimizer.own_settings(optim)}
    return keys | {
        f"{root}.optimizer_impl": module,
        f"{root}.optimizer": function,
        f"{root}.override_optimizer_config": arguments,
    }


def rollout_keys(config: Config, on_cpu: bool) -> Keys:
    rollout = config.rollout
    root = "actor_rollout_ref.rollout"
    longest = config.data.max_prompt_length + config.data.max_response_length
    batched = rollout.max_num_batched_tokens or BATCHED_TOKENS["verl"]
    sequences = sequences_at_once(config, hf_config_of(config), **_gpu(on_cpu))
    keys = {
        f"{root}.name": "vllm",
        f"{root}.mode": "async",
        **same(root, rollout, "n", "temperature", "top_p"),
        f"{root}.max_num_seqs": sequences,
        **same(root, rollout, "tensor_model_parallel_size", "gpu_memory_utilization"),
        f"{root}.free_cache_engine": rollout.free_cache_engine and not on_cpu,
        # A compiled model would round differently from the trainer, and a CPU's workers have TORCHDYNAMO_DISABLE.
        f"{root}.enforce_eager": bool(rollout.enforce_eager) or on_cpu,
        f"{root}.calculate_log_probs": True,
        f"{root}.logprobs_mode": "processed_logprobs",
        f"{root}.max_model_len": longest,
        # On a CPU it is large enough to prefill the longest sequence whole.
        f"{root}.max_num_batched_tokens": max(batched, longest if on_cpu else 0),
        f"{root}.load_format": "dummy",
        f"{root}.disable_log_stats": False,  # preemptions are counted from these statistics
        f"{root}.val_kwargs.temperature": rollout.val_temperature,
        f"{root}.val_kwargs.n": rollout.val_n,
        f"{root}.val_kwargs.do_sample": rollout.val_temperature > 0,
        f"{root}.seed": config.seed,
        f"{root}.log_prob_micro_batch_size_per_gpu": config.actor.log_prob_micro_batch_size_per_gpu,
        f"+{root}.engine_kwargs.vllm.worker_extension_cls": f"{PLUGIN}.worker_extension.QaRLWorkerExtension",
    }
    stops: Keys = {"stop": rollout.stop, "stop_token_ids": rollout.stop_token_ids}
    keys |= {f"+{STOPS}.{name}": list(ends) for name, ends in stops.items() if ends}
    if rollout.enable_prefix_caching is not None:  # null is verl's default, and on a CPU none
        keys[f"{root}.enable_prefix_caching"] = rollout.enable_prefix_caching
    if not on_cpu and rollout.tensor_model_parallel_size == 1:
        # vLLM's default. verl's default is a separate worker process, which starts only after the engine's.
        keys[f"+{root}.engine_kwargs.vllm.distributed_executor_backend"] = "uni"
    scheme = get_scheme(config.quant.scheme, group_size=config.quant.group_size)
    arguments = engine_arguments(kernel_request(config.quant.kernels, scheme.name))
    if not on_cpu:
        # At the levels above `linears` the trainer can follow only engines with these arguments.
        arguments = operator_arguments(
            scheme,
            aligned=planned_level(config, on_cpu).follows_engine,
            eager=bool(rollout.enforce_eager),
            max_num_seqs=sequences,
            kernels=config.quant.kernels,
        )
    if config.lora.r and (hf_config := hf_config_of(config)) is not None:
        model = meta_model(hf_config, trust_remote_code=config.model.trust_remote_code)
        targets = config.lora.target_modules
        leaves = adapted_leaves(target_linears(model, targets))
        arguments = AdapterSpec(config.lora.r, leaves, tuple(targets)).added_to(arguments)
    keys |= {f"+{root}.engine_kwargs.vllm.{name}": value for name, value in arguments.items()}
    overrides: dict[str, Any] = dict(FP32_HEAD) if config.model.head_dtype == "fp32" else {}
    if scheme.quantized:
        overrides["quantization_config"] = scheme.quantization_config(list(config.quant.ignore))
    if overrides:
        keys[f"+{root}.engine_kwargs.vllm.hf_overrides"] = overrides
    return keys


def turn_keys(config: Config) -> Keys:
    """Return the agent loop, and the keys of conversations. Ray's workers start in other folders."""
    # verl's own loops refuse tokenizers that do not come from their model family.
    loop = {LOOP: "qarl_single_turn"}
    if config.rollout.environment is None:
        return loop
    names = type(config.multi_turn).model_fields
    ours = ("max_turn_length", "timeout_s", "workers")
    values = {name: getattr(config.multi_turn, name) for name in names}
    return {
        LOOP: "qarl_environment",
        f"{MULTI_TURN}._target_": f"{PLUGIN}.config_classes.QaRLMultiTurnConfig",
        f"+{MULTI_TURN}.environment": resolved_function(config.rollout.environment),
        f"+{MULTI_TURN}.folder": os.getcwd(),
        **{
            f"{'+' if name in ours else ''}{MULTI_TURN}.{name}": value
            for name, value in values.items()
        },
    }


def resolved_function(spec: str) -> str:
    """Return a function's name, as `module:function` or with the absolute path of its file."""
    source, _, name = spec.rpartition(":")
    return f"{Path(source).resolve()}:{name}" if source.endswith(".py") else spec


def routing_keys(config: Config, on_cpu: bool) -> Keys:
    """Return the key of router replay in the servers. `fsdp_engine_settings` has that of the actor. Servers return the
    routing only if the actor replays it, because it is large: two bytes per token, layer and chosen expert."""
    hf_config = hf_config_of(config)
    has_experts = hf_config is not None and bool(experts_of(hf_config))
    replayed = has_experts and replays(config.rollout.router_replay, planned_level(config, on_cpu))
    return {"actor_rollout_ref.rollout.enable_rollout_routing_replay": replayed}


def planned_level(config: Config, on_cpu: bool) -> Level:
    """Return the alignment level that the actor will apply, or `quant.align` if the model's config cannot be read.

    On a machine without a GPU this assumes compute capability 9.0 for a run on GPUs. On other GPUs the engine then has
    one split of attention for nothing, which costs speed, but the actor's level is right.
    """
    hf_config = hf_config_of(config)
    if hf_config is None:
        return config.quant.align
    return applied_level(config, hf_config, "cpu" if on_cpu else "cuda").level


def hf_config_of(config: Config) -> Any:
    """Return the model's config, or None if it cannot be read. The checks of a run say what is wrong with it."""
    try:
        return hf_config_or_carried(config.model.path, config.model.trust_remote_code)[0]
    except UserError:
        return None


def trainer_keys(config: Config) -> Keys:
    trainer = config.trainer
    total = config.trainer.total_training_steps
    resume_path = trainer.resume_from_path
    # Like the local backend, evaluate after the last step if the run evaluates before the first.
    only_last = trainer.test_freq == -1 and trainer.val_before_train
    asked = {key.removeprefix("+"): value for key, value in config.verl.items()}
    root = "trainer.v1.sampler"
    path = f"{root}.custom_sampler.path"
    name = f"{root}.custom_sampler.name"
    sampler: Keys = {path: None, name: None}
    # Only verl's own samplers have these features. They count a group with failed responses as complete.
    if not (
        asked.get("algorithm.filter_groups.enable")
        or asked.get(f"{root}.sync_refill_failed_groups")
    ):
        sampler = {path: f"pkg://{PLUGIN}.trainer", name: "PromptReplayBuffer"}
        sampler |= {
            f"+{root}.sampler_kwargs.{key}": False
            for key in ("filter_groups", "sync_refill_failed_groups")
        }
    return {
        **same(
            "trainer",
            trainer,
            "nnodes",
            "n_gpus_per_node",
            "total_training_steps",
            "val_before_train",
        ),
        "trainer.total_epochs": total,
        "trainer.test_freq": total if only_last else trainer.test_freq,
        "trainer.project_name": "qarl",
        "trainer.experiment_name": config.name,
        "trainer.logger": ["file"],
        # verl's own trainer saves only by steps, and recomputes the old log-probs always, or never (bypass_mode).
        "trainer.v1.trainer_mode": "qarl_sync",
        "trainer.default_local_dir": str((config.run_dir / "checkpoints").resolve()),
        # At a positive frequency verl saves after the last step, too; the export is made from that checkpoint.
        "trainer.save_freq": total
        if trainer.save_freq == -1 and trainer.save_final
        else trainer.save_freq,
        "+trainer.save_minutes": trainer.save_minutes,
        "trainer.max_actor_ckpt_to_keep": trainer.max_ckpt_to_keep,
        "trainer.resume_mode": trainer.resume_mode,
        "trainer.resume_from_path": resume_path and str(Path(resume_path).resolve()),
        **sampler,
    }


def cpu_keys(config: Config) -> Keys:
    """Return what depends on the run among the settings of `qarl_machine/cpu.yaml`, the group for machines without
    GPUs. They keep the number of processes low, because each process imports torch and vLLM."""
    vllm = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    ranks = config.trainer.n_gpus_per_node
    return {
        f"{vllm}.kv_cache_memory_bytes": int(config.rollout.cpu_kvcache_space_gib * 2**30),
        # A single worker runs in the engine's process. Several workers need a process each.
        f"{vllm}.distributed_executor_backend": "uni"
        if config.rollout.tensor_model_parallel_size == 1
        else "mp",
        # These resources are only logical. verl asks Ray for CPUs per role and one GPU per trainer process.
        "ray_kwargs.ray_init.num_cpus": 16 + 8 * ranks,
        "ray_kwargs.ray_init.num_gpus": ranks,
    }
