"""Load and check everything that a local run needs before it starts. The cheapest checks come first.

So a wrong path, a prompt that is too long, or a reward function that raises gives one clear error, and not a stack
trace after the engine has started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qarl.align.cpu_attention import uses_engine_attention
from qarl.align.rotary import head_size_of
from qarl.checks.check import RunInputs
from qarl.checks.exactness import caches_prefixes
from qarl.checks.generation import check_sampling, check_sessions, ends_of_turns
from qarl.checks.gpu_memory_decides import sequences_at_once
from qarl.checks.inputs_record import Record
from qarl.checks.machine import this_machine
from qarl.checks.model_folder import cannot_build
from qarl.checks.registry import check_run
from qarl.config import Config
from qarl.console import stage
from qarl.data.prompts import PromptDataset, PromptSampler
from qarl.data.reward_workers import Reward
from qarl.kernels.cpu.attention_tiles import longest_exact_prompt
from qarl.objectives import verl_functions
from qarl.objectives.settings import objective_settings
from qarl.rollout.adapter_spec import AdapterSpec
from qarl.rollout.engine import EngineConfig
from qarl.rollout.engine_config import sequences_in_cache
from qarl.rollout.turns import Conversations
from qarl.schemes import get_scheme
from qarl.trainer.policy import Policy


@dataclass
class RunParts:
    policy: Policy
    tokenizer: Any
    pad_token_id: int
    train_prompts: PromptDataset
    val_prompts: PromptDataset | list[Any]
    sampler: PromptSampler
    reward_fn: Reward
    record: Record
    """What the run reads, for its checkpoints."""
    conversations: Conversations | None = None
    """Holds conversations, if there is an environment."""
    ends: tuple[int, ...] = ()
    """Token ids that end a turn."""


def prepare_run(config: Config) -> RunParts:
    """Run all checks (`qarl.checks.registry`), then load the weights. Raise UserError for the first that fails."""
    return load_parts(config, check_inputs(config))


def check_inputs(config: Config) -> RunInputs:
    """Run all checks. Return what they have loaded, everything but the weights."""
    verl_functions.require(
        objective_settings(config), advantages=config.algorithm.adv_estimator == "rloo"
    )
    with stage("checking data, model and machine", imports=True):
        inputs = check_run(config)
        inputs.record  # noqa: B018  a file that cannot be read is an error of the checks
    return inputs


def load_parts(config: Config, inputs: RunInputs) -> RunParts:
    """Load the weights. Return them with the checked `inputs`. Raise UserError if the model cannot be built or its
    engine cannot sample as the config asks."""
    tokenizer = inputs.tokenizer
    pad_token_id = (
        tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    )
    try:
        # transformers draws a bar meanwhile
        with stage(f"loading the weights of {config.model.path}", quiet=True):
            policy = Policy.load(config)
    except RuntimeError as error:
        raise cannot_build(config.model.path, " ".join(str(error).split())[:400]) from error
    vocabulary = policy.model.get_output_embeddings().weight.shape[0]
    check_sampling(
        config, level=policy.align, vocabulary=vocabulary, on_cpu=policy.device.type == "cpu"
    )
    if inputs.conversations is not None:
        inputs.conversations.sessions = sessions_at_once(config, policy)
        check_sessions(config, inputs.conversations.sessions)
    return RunParts(
        policy,
        tokenizer,
        pad_token_id or 0,
        inputs.train_prompts,
        inputs.val_prompts,
        inputs.sampler,
        inputs.reward_fn,
        inputs.record,
        inputs.conversations,
        ends_of_turns(config, tokenizer, inputs.hf_config),
    )


def sessions_at_once(config: Config, policy: Policy) -> int | None:
    """Return how many conversations are held in sessions at a time, or None if each turn is a request of its own.

    Sessions are for an engine whose bits the trainer follows, and for prompts so long that a prefill has other bits
    than decoding. `rollout.enable_prefix_caching=true` asks for requests, of which the checks say that they differ."""
    hf_config = policy.model.config
    if not uses_engine_attention(policy.model) or config.rollout.enable_prefix_caching:
        return None
    if config.longest_prefill <= longest_exact_prompt(head_size_of(hf_config)):
        return None
    engine = engine_config(config, policy)
    return max(min(sequences_in_cache(engine, hf_config), engine.max_num_seqs), 1)


def engine_config(config: Config, policy: Policy, *, routing: bool = False) -> EngineConfig:
    """Return the config of the engine that samples from `policy`.

    `routing`: whether rollouts also return each token's experts."""
    rollout = config.rollout
    adapters = policy.adapters
    machine = this_machine()
    return EngineConfig(
        model=config.model.path,
        trust_remote_code=config.model.trust_remote_code,
        scheme=get_scheme(config.quant.scheme, group_size=config.quant.group_size),
        ignore=tuple(config.quant.ignore),
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        max_num_seqs=sequences_at_once(
            config,
            policy.model.config,
            device=machine.device,
            gpu_memory_bytes=machine.gpu_memory_bytes,
        ),
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_gib=rollout.cpu_kvcache_space_gib,
        enforce_eager=rollout.enforce_eager,
        free_cache_engine=rollout.free_cache_engine,
        return_routed_experts=routing,
        head_dtype=config.model.head_dtype,
        dtype=config.model.dtype,
        aligned=policy.align.follows_engine,
        kernels=config.quant.kernels,
        enable_prefix_caching=caches_prefixes(config, policy.model.config, routing=routing),
        adapters=AdapterSpec.of(adapters.rank, adapters.targets) if adapters else None,
    )
