"""Write the two predicted columns of the table of recipes: seconds of a step, and GiB of a GPU.

    python scripts/recipe_plans.py docs/do/paper_runs.md

Both come from the command of a row, so a command that changes takes its prediction along. Seconds: `qarl bench plan`
with the numbers of the config, on the row's number of H100, whatever GPU the row names. GiB: the peak of the memory
plan on the row's GPU. Rows without a GPU keep their measured cells.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.bench.model import MODELS
from qarl.bench.plan.devices import assumed_rates
from qarl.bench.plan.predict import predict
from qarl.bench.plan.work import Work
from qarl.checks.machine import GPUS
from qarl.checks.memory import MemoryEstimate, estimate
from qarl.checks.memory_parts import GIB
from qarl.checks.model_size import ModelSize
from qarl.config import Config, load_config
from qarl.kernels.cuda.vllm_linears import VllmMarlinLinear
from qarl.kernels.triton.linears import TritonW4A16Linear

RATES = "h100"
PROMPT = 150
"""Mean tokens of a prompt: those of competition problems in their chat template, about. Nobody counted them."""
RESPONSES = ((640, 200), (3072, 1000), (20480, 4000))
"""data.max_response_length up to which a mean response is assumed -> its tokens."""
SECONDS, MEMORY = 7, 8
"""Columns of the table."""


@dataclass(frozen=True)
class Recipe:
    """A row of the table. `cells`: its texts. `config`: that of its command."""

    cells: list[str]
    config: Config

    @classmethod
    def of(cls, line: str) -> Recipe:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        return cls(cells, load_config(words_of(cells)))

    @property
    def gpus(self) -> int:
        """GPUs of the run, 0 on a CPU."""
        number, _, gpu = self.cells[0].split(maxsplit=2)
        return int(number) if gpu in GPUS else 0

    @property
    def model(self) -> str:
        """The model's folder of qarl/bench/models. What stands behind a comma is not part of the name."""
        return self.cells[1].partition(",")[0]

    @property
    def gib(self) -> float:
        """Memory of one of its GPUs."""
        return GPUS[self.cells[0].split()[2]][1]

    def memory(self) -> MemoryEstimate:
        return planned_memory(self.config, self.model, self.gib)

    def seconds(self) -> float:
        """Return the predicted seconds of a step. Raise UserError if an engine has no room for one sequence."""
        config = self.config
        longest = config.data.max_response_length
        mean = next(tokens for limit, tokens in RESPONSES if longest <= limit)
        sizes: dict[str, Any] = {"micro_tokens": config.actor.ppo_max_token_len_per_gpu}
        if not config.actor.use_dynamic_bsz:
            sizes = {"micro_batch": config.actor.ppo_micro_batch_size_per_gpu}
        work = Work(
            model=self.model,
            gpus=self.gpus,
            tensor_parallel=config.rollout.tensor_model_parallel_size,
            gpu_memory_utilization=config.rollout.gpu_memory_utilization,
            schemes=(config.quant.scheme,),
            levels=(config.quant.align,),
            old_log_probs=config.actor.old_log_probs,
            prompts=config.data.train_batch_size,
            n=config.rollout.n,
            prompt_length=PROMPT,
            response_length=(mean, longest),
            mini_batches=config.data.train_batch_size // config.actor.ppo_mini_batch_size,
            optimizer=config.optim.name,
            lora_r=config.lora.r or 0,
            **sizes,
        )
        (row,) = predict(work, assumed_rates(RATES))
        return float(row["step"])

    def predicted(self) -> str:
        """Return the row with its two predictions."""
        cells = list(self.cells)
        if self.gpus:
            seconds = self.seconds()
            cells[SECONDS] = f"{seconds:.0f}" if seconds >= 20 else f"{seconds:.1f}"
            cells[MEMORY] = f"{self.memory().peak[1] / GIB:.0f}"
        return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def words_of(cells: list[str]) -> list[str]:
    """Return the words of a row's command behind `qarl train`."""
    return shlex.split(cells[-1].strip("`"))[2:]


def planned_memory(config: Config, model: str, gib: float) -> MemoryEstimate:
    """Return the memory plan of a GPU with `gib` for a model of qarl/bench/models."""
    described = json.loads((MODELS / model / "config.json").read_text(encoding="utf-8"))
    size = ModelSize.from_config(described)
    # FSDP2 gathers what Marlin reads, layer by layer; the local trainer has a copy of every layer that it trains.
    kernels = dict.fromkeys(
        size.linears().values(),
        VllmMarlinLinear if config.backend == "local" else TritonW4A16Linear,
    )
    memory = int(gib * GIB)
    return estimate(size, config, device="cuda", gpu_memory_bytes=memory, kernels=kernels)


def rows_of(page: str) -> list[str]:
    """Return the lines of the table of recipes, without its two heads."""
    return page.partition("\n| hardware |")[2].partition("\n\n")[0].splitlines()[2:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="the Markdown file with the table")
    path = parser.parse_args().page
    page = path.read_text(encoding="utf-8")
    for line in rows_of(page):
        page = page.replace(line, Recipe.of(line).predicted())
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
