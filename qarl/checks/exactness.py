"""Where level `exact` does not promise δ = 0: several threads with long prompts, and adapters of small linears.

A run, the doctor and TRL say these exceptions beside the level. docs/understand/alignment.md and
docs/understand/adapters.md have the reasons.
"""

from __future__ import annotations

from typing import Any

from qarl.align.levels import EXACT_PROMPT
from qarl.checks.layers import meta_model
from qarl.config import Config
from qarl.lora.layers import target_linears
from qarl.process import thread_count

ONE_BY_ONE = 4096
"""PyTorch sums a product of M rows of r inputs with N outputs in another order if M * r * N is at most this number."""


def exceptions(config: Config, hf_config: Any) -> list[str]:
    """Return the exceptions from δ = 0 of a run on a CPU whose applied level is `exact`, a sentence each."""
    return [text for text in (_of_threads(config), _of_adapters(config, hf_config)) if text]


def _of_threads(config: Config) -> str | None:
    threads = thread_count(config.trainer.num_threads, processes=config.trainer.n_gpus_per_node)
    longest = config.data.max_prompt_length
    if threads == 1 or longest <= EXACT_PROMPT:
        return None
    return (
        f"quant.align={config.quant.align} is not exact for prompts of more than about {EXACT_PROMPT} tokens "
        f"(data.max_prompt_length={longest}): with {threads} threads vLLM sums their attention in another order; "
        "for δ = 0 set trainer.num_threads=1, or OMP_NUM_THREADS=1"
    )


def _of_adapters(config: Config, hf_config: Any) -> str | None:
    rank = config.lora.r
    if not rank:
        return None
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
        f"batch: vLLM may sum their small products of adapters (lora.r={rank}) in another order, in "
        f"{', '.join(sorted(responses))}"
    )
