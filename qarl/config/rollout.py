"""The section `rollout` of the config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qarl.config.types import Sane, Section, Unit

_RANDOM = "responses are close to random tokens"


class RolloutConfig(Section):
    """Sampling, and the vLLM engine that samples."""

    n: Annotated[
        int,
        Unit("responses"),
        Sane(2, 1024, "a group of that size costs many rollouts but hardly improves its mean score"),
    ] = Field(ge=2)
    """Responses per prompt (GRPO's group). At least 2, because an advantage compares responses to the same prompt."""

    temperature: Annotated[
        float, Sane(0.1, 2.0, _RANDOM, "responses to one prompt are almost alike and teach little")
    ] = Field(default=1.0, gt=0)
    """Sampling temperature in training. It cannot be 0, because greedy responses to a prompt would all be equal."""

    top_p: Annotated[
        float, Sane(0.1, 1.0, "", "almost only the likeliest token is left: responses are almost alike")
    ] = Field(default=1.0, gt=0, le=1)
    """Probability mass that nucleus sampling keeps. Less than 1 needs backend=local and quant.align=model or exact."""

    top_k: Annotated[
        int,
        Unit("tokens"),
        Sane(-1, 2**24, "no vocabulary has that many tokens, so it keeps all of them, as -1 does"),
    ] = Field(default=-1, ge=-1)
    """Sample only from the top_k likeliest tokens; -1 or 0 means all. Values above 0 need backend=local and
    quant.align=model or exact."""

    val_temperature: Annotated[float, Sane(0.0, 2.0, _RANDOM)] = Field(default=0.0, ge=0)
    """Sampling temperature of evaluations; 0 is greedy. It can be above 0 only with backend=verl, which can evaluate
    several responses per problem (scripts/prepare_math_eval.py)."""

    max_num_seqs: Annotated[int, Unit("sequences"), Sane(1, 16384, "vLLM reserves buffers for every sequence")] = Field(
        default=256, ge=1
    )
    """Maximum number of sequences that vLLM decodes at once."""

    max_num_batched_tokens: Annotated[
        int | None, Unit("tokens"), Sane(1, 2**21, "vLLM reserves activations for every token of a step")
    ] = Field(default=None, ge=1)
    """Maximum number of tokens in one vLLM step. Must be at least max_num_seqs; null means vLLM's default."""

    gpu_memory_utilization: Annotated[
        float,
        Sane(0.01, 0.97, "no memory is left for the trainer", "no model's weights fit into this share of the GPU"),
    ] = Field(default=0.5, gt=0, le=1)
    """Fraction of the GPU's memory that vLLM may use, including its weights. The trainer needs the rest. CUDA only."""

    cpu_kvcache_space_gib: Annotated[
        float,
        Unit("GiB"),
        Sane(1 / 1024, 4096, "no machine has that much memory", "it holds only a few tokens"),
    ] = Field(default=1.0, gt=0, le=2**20)
    """Size of vLLM's KV cache in GiB. CPU only."""

    enforce_eager: bool | None = None
    """Run vLLM without CUDA graphs. It starts faster but decodes more slowly. null means true on a CPU and false on
    GPUs. On GPUs only decode steps are captured, and the model is not compiled,
    except in W4A16 and BF16 below quant.align=model, which take vLLM's default."""

    free_cache_engine: bool = True
    """On GPUs vLLM sleeps while the trainer works: its weights move to host memory, and its KV cache is freed. false
    saves the seconds of the move, but then the update has only the memory that vLLM leaves."""

    tensor_model_parallel_size: Annotated[
        int, Unit("GPUs"), Sane(1, 64, "splitting a layer over that many GPUs gains nothing")
    ] = Field(default=1, ge=1)
    """Number of GPUs that one copy of the rollout model is split over. Must be 1 with backend=local. If it is above 1,
    quant.align is at most linears, because each GPU rounds its part of a sum."""

    router_replay: Literal["auto", "on", "off"] = "auto"
    """In a mixture of experts, send each token of the trainer's forward to the experts that it had in the rollout (R3,
    arXiv 2510.11370). `auto`: on at quant.align=off and linears. At model and exact it is off, because trainer and
    engine choose the same experts anyway."""

    rebuild_on_failure: bool = False
    """If vLLM fails or dies, start a new engine and continue. Only for backend=local."""
