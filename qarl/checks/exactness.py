"""Where level `exact` does not promise δ = 0: long prompts with several threads or a prefix cache, long conversations
in verl, small adapters.

A run, the doctor and TRL say these exceptions beside the level. docs/understand/alignment.md and
docs/understand/adapters.md have the reasons.
The defaults (`qarl.checks.exact_threads` and `caches_prefixes`) avoid the first two.
"""

from __future__ import annotations

from typing import Any

import torch

from qarl.align.rotary import head_size_of
from qarl.checks.layers import meta_model
from qarl.config import Config
from qarl.config.lora import engine_rank
from qarl.kernels.cpu.attention_tiles import longest_exact_prompt
from qarl.lora.layers import target_linears
from qarl.process import thread_count

ONE_BY_ONE = 4096
"""PyTorch sums a product of M rows of r inputs with N outputs in another order if M * r * N is at most this number."""


def exceptions(config: Config, hf_config: Any) -> list[str]:
    """Return the exceptions from δ = 0 of a run on a CPU whose applied level is `exact`, a sentence each."""
    found = (
        _of_threads(config, hf_config),
        _of_prefix_cache(config, hf_config),
        _of_later_turns(config, hf_config),
        _of_adapters(config, hf_config),
    )
    return [text for text in found if text]


def caches_prefixes(config: Config, hf_config: Any, *, routing: bool) -> bool | None:
    """Return whether the local engine has a prefix cache (`EngineConfig.enable_prefix_caching`).

    `routing`: whether rollouts return each token's experts, which cached tokens have none of."""
    asked = config.rollout.enable_prefix_caching
    if asked is not None or torch.cuda.is_available():
        return asked
    if routing:
        return False
    promises_bits = config.quant.align.follows_engine
    return not promises_bits or config.longest_prefill <= exact_prompt(hf_config)


def _of_threads(config: Config, hf_config: Any) -> str | None:
    threads = thread_count(config.trainer.num_threads, processes=config.trainer.n_gpus_per_node)
    longest = config.longest_prefill
    exact = exact_prompt(hf_config)
    if threads == 1 or longest <= exact:
        return None
    return (
        f"quant.align={config.quant.align} is not exact for prompts of more than {exact} tokens "
        f"({_key(config)}={longest}): with {threads} threads vLLM sums their attention in another order; "
        "for δ = 0 set trainer.num_threads=1, or OMP_NUM_THREADS=1"
    )


def _of_prefix_cache(config: Config, hf_config: Any) -> str | None:
    longest = config.longest_prefill
    exact = exact_prompt(hf_config)
    if not config.rollout.enable_prefix_caching or longest <= exact:
        return None
    return (
        f"quant.align={config.quant.align} is not exact for prompts of more than {exact} tokens "
        f"({_key(config)}={longest}): behind a cached prefix vLLM sums their attention in another order; "
        "for δ = 0 leave out rollout.enable_prefix_caching"
    )


def _of_later_turns(config: Config, hf_config: Any) -> str | None:
    """verl's servers have no sessions (`qarl.rollout.sessions`)."""
    longest = config.longest_prefill
    exact = exact_prompt(hf_config)
    if config.backend != "verl" or not config.has_turns or longest <= exact:
        return None
    return later_turns_differ(f"quant.align={config.quant.align}", longest, exact)


def later_turns_differ(level: str, longest: int, exact: int) -> str:
    """Return the sentence about conversations of up to `longest` tokens before their last turn's end. `exact`: most
    tokens of a prompt that has the bits of decoding."""
    return (
        f"{level} is not exact for later turns of conversations of more than {exact} tokens "
        f"(data.max_prompt_length + data.max_response_length - 1={longest}): verl's engine prefills there what it "
        f"decoded before, and sums its attention in another order; for δ = 0 keep this sum at {exact}, or set "
        "backend=local"
    )


def _key(config: Config) -> str:
    """Return what decides the length of the longest prompt."""
    if not config.has_turns:
        return "data.max_prompt_length"
    return "data.max_prompt_length + data.max_response_length - 1, in a later turn"


def exact_prompt(hf_config: Any) -> int:
    """Return the most tokens of a prompt whose prefill has the same bits however it is cut."""
    return longest_exact_prompt(head_size_of(hf_config))


def _of_adapters(config: Config, hf_config: Any) -> str | None:
    if not config.lora.r:
        return None
    rank = engine_rank(config.lora.r)
    model = meta_model(hf_config, trust_remote_code=config.model.trust_remote_code)
    shapes = target_linears(model, config.lora.target_modules)
    responses = {
        name.rpartition(".")[2]: ONE_BY_ONE // (rank * outputs)
        for name, (outputs, _) in shapes.items()
        if rank * outputs <= ONE_BY_ONE
    }
    if not responses:
        return None
    return (
        f"quant.align={config.quant.align} may not be exact for the last {max(responses.values())} responses of a "
        f"batch: vLLM may sum their small products of adapters (lora.r={config.lora.r}) in another order, in "
        f"{', '.join(sorted(responses))}"
    )
