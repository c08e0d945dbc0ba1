"""The keys of `qarl bench plan`: a model, GPUs, and the sizes of a training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from qarl.bench.arguments import Schemes
from qarl.bench.plan.devices import SHEETS
from qarl.config.command_arguments import Commas, read_request, writes_json
from qarl.config.level import Level
from qarl.config.optimizers import optimizer_names
from qarl.config.types import OneOf
from qarl.schemes import engine_scheme_names


@pydantic.dataclasses.dataclass(frozen=True, config={"extra": "forbid"})
class Work:
    """
    model             a name from qarl/bench/models, or a folder
    gpu               h100, h200, h800 or a100; rates are shares of its data sheet
    rates             a file of `qarl.bench kernels` instead; a GPU's sheet adds links and the size of its memory
    gpus              total number; each engine uses tensor_parallel GPUs and gpu_memory_utilization of their memory
    schemes           bf16,w8a8,fp8,w4a16
    levels            off,linears,model; all by default. bf16 has no `linears`
    old_log_probs     auto, recompute or rollout, as `actor.old_log_probs`
    prompts, n        prompts per step, each of prompt_length tokens, and responses per prompt
    response_length   tokens: mean, or mean,longest (memory and the end of the rollout depend on the longest)
    mini_batches, micro_batch   optimizer steps per training step, rows per forward
    micro_tokens      tokens per forward, instead of micro_batch (`actor.ppo_max_token_len_per_gpu`)
    optimizer         a value of optim.name; muon on GPUs by default
    lora_r            rank of adapters on a frozen base; 0 trains all weights. Their own products are left out
    constant          assumed seconds per step that depend on nothing here: Ray, tokenizer, rewards, sleep and wake
    json              the file to write"""

    model: str = "Qwen3-8B"
    gpu: Literal[*SHEETS] = "h100"  # type: ignore[valid-type]  # not written out
    rates: Path | None = None
    gpus: PositiveInt = 8
    tensor_parallel: PositiveInt = 1
    gpu_memory_utilization: PositiveFloat = 0.6
    schemes: Schemes = engine_scheme_names()
    levels: Annotated[tuple[Level, ...], Commas] = tuple(Level)[:-1]
    old_log_probs: Literal["auto", "recompute", "rollout"] = "auto"
    prompts: PositiveInt = 128
    n: PositiveInt = 8
    prompt_length: PositiveInt = 1024
    response_length: Annotated[tuple[PositiveInt, ...], Commas] = (2048,)
    mini_batches: PositiveInt = 4
    micro_batch: PositiveInt = 4
    micro_tokens: PositiveInt | None = None
    optimizer: Annotated[str, OneOf(optimizer_names)] = "adamw"
    lora_r: NonNegativeInt = 0
    constant: NonNegativeFloat = 5.0
    json: Annotated[Path, writes_json("rates", "results")] | None = None

    @classmethod
    def parse(cls, part: str, words: Sequence[str]) -> Work:
        measured = any(argument.startswith("rates=") for argument in words)
        defaults: dict[str, Any] = (
            {"gpus": 1, "mini_batches": 1} if measured else {"optimizer": "muon"}
        )
        return read_request(cls, words, example="qarl bench plan model=Qwen3-8B", **defaults)

    @property
    def rows(self) -> float:
        """Rows of the mean length in a forward."""
        if self.micro_tokens is None:
            return self.micro_batch
        return self.micro_tokens / (self.prompt_length + self.response_length[0])

    @property
    def batches(self) -> int:
        """Forwards of a step on one GPU."""
        return math.ceil(self.prompts * self.n / (self.gpus * self.rows))
