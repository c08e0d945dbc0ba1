"""The verl backend: translates our config into verl's and runs verl's PPO trainer with it.

`verl_config` is the only place that knows verl's keys. It starts from verl's own `ppo_trainer` config, so a key that
verl no longer has is an error here, not a silent no-op. Configs that verl cannot run are refused (`qarl.verl.checks`).
`differences` lists what verl does slightly differently.

The algorithm is that of `qarl.trainer.local`, but it runs on Ray, FSDP2 and vLLM servers. `qarl.verl.plugin` adds the
parts that verl lacks. Statements here about verl were checked against the source of verl 0.9.1.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl.checkpoint.storage import checkpoints_dir
from qarl.checks.run import check_run
from qarl.config import ActorConfig, Config, write_resolved
from qarl.console import note, stage
from qarl.errors import UserError
from qarl.metrics.tracker import Ending
from qarl.process import runs_on_cpu
from qarl.verl import checks
from qarl.verl.batches import refuse_partial_batches
from qarl.verl.checks import PLUGIN
from qarl.verl.engine_keys import engine_settings
from qarl.verl.failure import as_user_error, what_resumes
from qarl.verl.level import graphs, level_lines
from qarl.verl.metrics import MetricsFollower
from qarl.verl.objectives import algorithm_keys, objective_keys, refuse_second_correction
from qarl.verl.optimizer import optim_keys
from qarl.verl.process import local_path, memory_lines, set_environment, worker_environment
from qarl.verl.resume import open_verl_run
from qarl.verl.routing import routing_keys
from qarl.verl.startup import answered_interrupt
from qarl.vllm_versions.head import FP32_HEAD

VERL_BATCHED_TOKENS = 8192
Keys = dict[str, Any]


def train(config: Config, *, started: float | None = None) -> dict[str, Any]:
    """Run `config` in verl until it ends or Ctrl-C stops it. Return the content of `summary.json`."""
    start = time.perf_counter() if started is None else started
    on_cpu = runs_on_cpu(config.backend)
    checks.refuse_unsupported(config)
    set_environment(config, on_cpu)
    with stage("checking data, model and machine"):
        check_run(config)
    resolved = verl_config(config, on_cpu=on_cpu)
    for text in differences(config, on_cpu):
        note(text)
    with open_verl_run(config) as start_step:
        write_resolved(config, config.run_dir / "config.yaml")
        return run(config, resolved, start, start_step)


def run(config: Config, resolved: Any, start: float, start_step: int) -> dict[str, Any]:
    """Run verl's trainer from `start_step` and return the summary. The caller must hold the lock of the run folder."""
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    from qarl.checkpoint.storage import write_text
    from qarl.metrics.tracker import write_versions

    write_versions(config.run_dir)
    write_text(config.run_dir / "verl.yaml", as_yaml(resolved))
    failure: BaseException | None = None
    with MetricsFollower(config, Path(os.environ["VERL_FILE_LOGGER_PATH"]), start, start_step=start_step) as follower:
        try:
            with answered_interrupt(lambda: what_resumes(checkpoints_dir(config.run_dir))):
                run_ppo(resolved, task_runner_class=TaskRunnerV1)
        except BaseException as error:
            failure = as_user_error(error, checkpoints_dir(config.run_dir)) or error
        finally:
            ray.shutdown()
    summary, first = follower.summary(failure)
    ending = Ending(first)
    if config.trainer.save_final and summary["finished"]:
        with ending.attempt():
            summary = export_final(config, summary)
    if ending.failure is not None and not isinstance(ending.failure, KeyboardInterrupt):
        raise ending.failure
    return summary


def export_final(config: Config, summary: dict[str, Any]) -> dict[str, Any]:
    """Export the final model from verl's last checkpoint. Return the summary with the export folder added.

    Raise UserError if the disk is full or the files of some ranks are not on this machine. The checkpoint is kept.
    """
    from qarl.checkpoint.export import ExportRequest, export
    from qarl.checkpoint.storage import EXPORT
    from qarl.metrics.tracker import write_summary

    output = config.run_dir / EXPORT
    step, trust = config.trainer.total_training_steps, config.model.trust_remote_code
    try:
        print(export(ExportRequest(config.run_dir, output, step, overwrite=True, trust_remote_code=trust)))
    except UserError as error:
        failed = ": ".join(part for part in (error.what, error.why) if part)
        write_summary(config.run_dir, summary | {"finished": False, "failed": failed})
        command = f"python -m qarl.export run={config.run_dir} output={output}"
        raise UserError(
            f"the trained model could not be exported: {error.what}",
            where=error.where,
            why=error.why,
            fix=f"{error.fix + '; ' if error.fix else ''}the checkpoint is complete; to export it, run {command}",
        ) from error
    summary["checkpoint"] = str(output)
    write_summary(config.run_dir, summary)
    return summary


def dry_run(config: Config) -> str:
    """Return verl's whole config for this run as YAML, after verl's own checks. Start nothing.

    The last lines name the keys that verl does not support. A run with such keys is refused (`refuse_unsupported`).
    """
    on_cpu, missing = runs_on_cpu(config.backend), checks.unsupported(config)
    set_environment(config, on_cpu)
    resolved = verl_config(config, on_cpu=on_cpu)
    lines = [f"# note: {note}" for note in differences(config, on_cpu)]
    lines += [f"# resolved for {'a machine without GPUs; VERL_PLATFORM=nvidia for GPUs' if on_cpu else 'GPUs'}"]
    lines += [f"# {line}" for line in (*level_lines(config), *memory_lines(config, on_cpu=on_cpu))]
    lines += [as_yaml(resolved).rstrip("\n")]
    lines += [f"# not supported by verl: a value of {key} other than {v}" for key, v in missing.items()]
    return "\n".join([*lines, ""])


def verl_config(config: Config, *, on_cpu: bool) -> Any:
    """Return verl's `ppo_trainer` config for this run, an OmegaConf DictConfig. verl's own validation has accepted it.

    Raise UserError if verl lacks a key of the section `verl`, or if a check of QaRL or verl refuses the config.
    """
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose(config_name="ppo_trainer")
    checks.refuse_own(config.verl)
    refuse_second_correction(config)
    for key, value in {**verl_keys(config, on_cpu), **config.verl}.items():
        if OmegaConf.is_dict(OmegaConf.select(composed, key)) and not isinstance(value, Mapping):
            raise UserError(
                f"verl's config does not take {key}={value!r}",
                where=f"verl.{key}",
                why="this is a section of verl's config: it holds keys, not a value",
                fix=f"set its keys one by one: verl.{key}.NAME=VALUE",
            )
        try:
            OmegaConf.update(composed, key.removeprefix("+"), value, force_add=key.startswith("+"))
        except OmegaConfBaseException as error:
            raise UserError(
                f"verl's config does not take {key}={value!r}",
                where=f"verl.{key}" if key in config.verl else key,
                why=str(error).splitlines()[0],
                fix="look the key up in verl's ppo_trainer.yaml; to add a key, write +KEY in the YAML mapping `verl`",
            ) from error
    checks.refuse_no_export(config, composed)
    checks.refuse_ignored(composed)
    refuse_partial_batches(composed, config.verl)
    checks.validate(composed)
    return composed


def as_yaml(resolved: Any) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(resolved, resolve=True)


def differences(config: Config, on_cpu: bool) -> list[str]:
    """Return one line for each key of `config` to which verl gives a different value or meaning than documented."""
    notes = []
    wanted, given = config.rollout.max_num_batched_tokens, batched_tokens(config, on_cpu)
    if wanted != given:
        why = "prompts are prefilled whole on a CPU" if given != VERL_BATCHED_TOKENS else "verl's default, not vLLM's"
        written = "null" if wanted is None else wanted
        notes.append(f"rollout.max_num_batched_tokens={written} is {given} here: {why}")
    if on_cpu and config.rollout.enforce_eager is False:
        notes.append("rollout.enforce_eager=false becomes true here, because a CPU has no CUDA graphs")
    if config.trainer.val_max_prompts is not None and config.data.shuffle:
        notes.append("trainer.val_max_prompts: verl draws that many prompts at random by data.seed, not the first ones")
    if config.trainer.test_freq == -1 and not config.trainer.val_before_train:
        notes.append("nothing is evaluated: trainer.test_freq=-1 and trainer.val_before_train=false")
    return notes


# Below is one function for each section of verl's config.


def verl_keys(config: Config, on_cpu: bool) -> Keys:
    """Return verl's dotted keys with their values for this run. `+` marks keys that verl's YAML does not list."""
    keys = {
        **data_keys(config),
        **reward_keys(config),
        **model_keys(config),
        **actor_keys(config),
        **optim_keys(config),
        **rollout_keys(config, on_cpu),
        **routing_keys(config, on_cpu),
        **algorithm_keys(config),
        **trainer_keys(config),
        # Otherwise workers would have only the environment of Ray, which may have been started before this run.
        "+ray_kwargs.ray_init.runtime_env.env_vars": worker_environment(config, on_cpu),
    }
    return keys | (cpu_keys(config) if on_cpu else {})


def same(root: str, section: Any, *names: str) -> Keys:
    """Return {`root`.NAME: value} for those keys of our `section` that have the same names in verl (`names`)."""
    return {f"{root}.{name}": getattr(section, name) for name in names}


def data_keys(config: Config) -> Keys:
    data = config.data
    # verl wants validation files even if nothing is evaluated.
    limit = config.trainer.val_max_prompts or -1
    return {
        "data.train_files": [str(Path(file).resolve()) for file in data.train_files],
        "data.val_files": [str(Path(file).resolve()) for file in data.val_files or data.train_files],
        "data.val_max_samples": limit if data.val_files else 1,
        **same("data", data, "train_batch_size", "max_prompt_length", "max_response_length", "shuffle", "prompt_key"),
        "data.filter_overlong_prompts": data.filter_overlong_prompts,
        "data.seed": config.seed,
        "data.truncation": "error",
        "data.trust_remote_code": config.model.trust_remote_code,
    }


def reward_keys(config: Config) -> Keys:
    """Return keys that make verl call `qarl.verl.plugin.reward.score`, which calls the config's `reward.function`."""
    source, _, name = config.reward.function.rpartition(":")
    function = f"{Path(source).resolve()}:{name}" if source.endswith(".py") else config.reward.function
    root = "reward.custom_reward_function"
    return {
        f"{root}.path": f"pkg://{PLUGIN}.reward",
        f"{root}.name": "score",
        f"+{root}.reward_kwargs": {"function": function, "timeout_s": config.reward.timeout_s},
    }


def model_keys(config: Config) -> Keys:
    model = "actor_rollout_ref.model"
    return {
        f"{model}.path": local_path(config.model.path),
        f"{model}.trust_remote_code": config.model.trust_remote_code,
        f"{model}.enable_gradient_checkpointing": config.model.gradient_checkpointing,
        f"{model}.use_remove_padding": config.model.use_remove_padding,
        f"+{model}.override_config.attention_dropout": 0.0,
        # verl's default, flash_attention_2, needs a package that neither lock has. `qarl.align.packed_attention`
        # replaces sdpa, on CUDA by PyTorch's own variable-length Flash Attention.
        f"+{model}.override_config.attn_implementation": "sdpa",
    }


def actor_keys(config: Config) -> Keys:
    actor, root = config.actor, "actor_rollout_ref.actor"
    return {
        f"{root}.strategy": "fsdp2",
        **same(root, actor, "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs"),
        **same(root, actor, "use_dynamic_bsz", "grad_clip"),
        **objective_keys(config),
        **token_limits(actor),
        f"{root}.fsdp_config._target_": f"{PLUGIN}.config.QuantFSDPEngineConfig",
        f"{root}.fsdp_config.model_dtype": config.optim.master_dtype,
        f"{root}.fsdp_config.seed": config.seed,
        f"{root}.data_loader_seed": config.seed,
        **{f"+{root}.fsdp_config.quant.{name}": value for name, value in engine_settings(config).items()},
    }


def token_limits(actor: ActorConfig) -> Keys:
    """Return verl's keys that limit the tokens of a micro-batch, except those that are null in QaRL's config. verl's
    default limit for log-probs is its limit for the update."""
    limits = {
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": actor.log_prob_max_token_len_per_gpu,
    }
    return {key: limit for key, limit in limits.items() if limit is not None}


def rollout_keys(config: Config, on_cpu: bool) -> Keys:
    from qarl.quant.scheme import get_scheme

    rollout, root = config.rollout, "actor_rollout_ref.rollout"
    longest = config.data.max_prompt_length + config.data.max_response_length
    keys = {
        f"{root}.name": "vllm",
        f"{root}.mode": "async",
        **same(root, rollout, "n", "temperature", "top_p", "max_num_seqs"),
        **same(root, rollout, "tensor_model_parallel_size", "gpu_memory_utilization", "free_cache_engine"),
        f"{root}.enforce_eager": bool(rollout.enforce_eager),
        f"{root}.calculate_log_probs": True,
        f"{root}.logprobs_mode": "processed_logprobs",
        f"{root}.max_model_len": longest,
        f"{root}.max_num_batched_tokens": batched_tokens(config, on_cpu),
        f"{root}.load_format": "dummy",
        f"{root}.disable_log_stats": False,  # preemptions are counted from these statistics
        f"{root}.val_kwargs.temperature": rollout.val_temperature,
        f"{root}.val_kwargs.do_sample": rollout.val_temperature > 0,
        f"{root}.seed": config.seed,
        # For models whose tokenizer does not come from their model family.
        f"{root}.agent.default_agent_loop": "qarl_single_turn",
        f"{root}.log_prob_micro_batch_size_per_gpu": config.actor.log_prob_micro_batch_size_per_gpu,
        f"+{root}.engine_kwargs.vllm.worker_extension_cls": f"{PLUGIN}.worker_extension.QaRLWorkerExtension",
    }
    if not on_cpu and not rollout.enforce_eager:
        keys |= {f"+{root}.engine_kwargs.vllm.{name}": value for name, value in graphs(config).items()}
    scheme = get_scheme(config.quant.scheme, group_size=config.quant.group_size)
    overrides: dict[str, Any] = dict(FP32_HEAD) if config.model.head_dtype == "fp32" else {}
    if scheme.quantized:
        overrides["quantization_config"] = scheme.quantization_config(list(config.quant.ignore))
    if overrides:
        keys[f"+{root}.engine_kwargs.vllm.hf_overrides"] = overrides
    return keys


def batched_tokens(config: Config, on_cpu: bool) -> int:
    """Return `max_num_batched_tokens`. On a CPU it is large enough to prefill the longest sequence whole."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    return max(config.rollout.max_num_batched_tokens or VERL_BATCHED_TOKENS, longest if on_cpu else 0)


def trainer_keys(config: Config) -> Keys:
    trainer, total = config.trainer, config.trainer.total_training_steps
    resume_path = trainer.resume_from_path
    # Like the local backend, evaluate after the last step if the run evaluates before the first.
    only_last = trainer.test_freq == -1 and trainer.val_before_train
    return {
        **same("trainer", trainer, "nnodes", "n_gpus_per_node", "total_training_steps", "val_before_train"),
        "trainer.total_epochs": total,
        "trainer.test_freq": total if only_last else trainer.test_freq,
        "trainer.project_name": "qarl",
        "trainer.experiment_name": config.name,
        "trainer.logger": ["file"],
        # verl's own trainer saves only by steps, and recomputes the old log-probs always, or never (bypass_mode).
        "trainer.v1.trainer_mode": "qarl_sync",
        "trainer.default_local_dir": str((config.run_dir / "checkpoints").resolve()),
        # At a positive frequency verl saves after the last step, too; the export is made from that checkpoint.
        "trainer.save_freq": total if trainer.save_freq == -1 and trainer.save_final else trainer.save_freq,
        "+trainer.save_minutes": trainer.save_minutes,
        "trainer.max_actor_ckpt_to_keep": trainer.max_ckpt_to_keep,
        "trainer.resume_mode": trainer.resume_mode,
        "trainer.resume_from_path": resume_path and str(Path(resume_path).resolve()),
        **sampler_keys(config),
    }


def sampler_keys(config: Config) -> Keys:
    """Return the keys of our sampler, or {} if the section `verl` asks for a feature that only verl's samplers have.

    In that case verl's sampler counts a group with failed responses as complete.
    """
    asked = {key.removeprefix("+"): value for key, value in config.verl.items()}
    if asked.get("algorithm.filter_groups.enable") or asked.get("trainer.v1.sampler.sync_refill_failed_groups"):
        return {}
    return {
        "trainer.v1.sampler.custom_sampler.path": f"pkg://{PLUGIN}.replay",
        "trainer.v1.sampler.custom_sampler.name": "PromptReplayBuffer",
        "+trainer.v1.sampler.sampler_kwargs.filter_groups": False,
        "+trainer.v1.sampler.sampler_kwargs.sync_refill_failed_groups": False,
    }


def cpu_keys(config: Config) -> Keys:
    """Return the settings that a run without GPUs needs besides `VERL_PLATFORM=cpu`.

    They keep the number of processes low, because each process imports torch and vLLM.
    """
    rollout = "actor_rollout_ref.rollout"
    # A single worker runs in the engine's process. Several workers need a process each.
    executor = "uni" if config.rollout.tensor_model_parallel_size == 1 else "mp"
    return {
        "trainer.device": "cpu",
        "data.dataloader_num_workers": 0,
        "reward.num_workers": 1,
        "actor_rollout_ref.model.external_lib": f"{PLUGIN}.cpu",
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
        f"{rollout}.free_cache_engine": False,
        f"+{rollout}.enable_sleep_mode": False,
        # A compiled model would round differently from the trainer, and the workers have TORCHDYNAMO_DISABLE.
        f"{rollout}.enforce_eager": True,
        # A prompt that is prefilled in parts or after a cached prefix gets different bits.
        f"{rollout}.enable_chunked_prefill": False,
        f"{rollout}.enable_prefix_caching": False,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 64,
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes": int(config.rollout.cpu_kvcache_space_gib * 2**30),
        f"+{rollout}.engine_kwargs.vllm.distributed_executor_backend": executor,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        # These resources are only logical. verl asks Ray for CPUs per role and one GPU per trainer process.
        "ray_kwargs.ray_init.num_cpus": 16 + 8 * config.trainer.n_gpus_per_node,
        "+ray_kwargs.ray_init.num_gpus": config.trainer.n_gpus_per_node,
        "+ray_kwargs.ray_init.include_dashboard": False,
    }
