"""Arguments of `steps`, `rollout`, `trainer` and `publish`, which share all keys. They are checked before any work.

python -m qarl.bench steps                                  all schemes; on a CPU with a model of 135M parameters
python -m qarl.bench steps model=Qwen3-8B layers=4 schemes=bf16,fp8 json=FILE.json
python -m qarl.bench rollout batch=1,16,64 response_length=32,128
python -m qarl.bench trainer                                old log-probs and update, without an engine
python -m qarl.bench publish                                quantize and publish, part by part
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from qarl.bench.arguments import DEVICES, check_divides, device_of, read
from qarl.bench.sources import Source, default_group_size, find_model
from qarl.config.quant import ROLLOUT_SCHEMES
from qarl.errors import UserError

LEVELS = ("off", "linears", "model", "exact")
MASTER_DTYPES = ("fp32", "bf16")


class Case(NamedTuple):
    """The scheme and level that a launch measures. For `rollout` and `publish`, `level` is empty."""

    scheme: str
    level: str

    def __str__(self) -> str:
        return f"{self.scheme}, level {self.level}" if self.level else self.scheme


@dataclass(frozen=True)
class Arguments:
    """
    model            a name from qarl/bench/models, or a folder; by default SmolLM2-135M on a CPU, Qwen3-8B on a GPU
    layers           number of decoder layers to keep; all by default
    schemes          bf16,w8a8,fp8,w4a16; all ratios are relative to bf16
    levels           off,linears,model,exact; all but exact by default; bf16 has no `linears`
    prompts, n       prompts per step, and responses per prompt
    prompt_length    number of random tokens in a prompt
    response_length  exact number of tokens in a response; `rollout` takes several, with commas
    batch            only for `rollout`: sequences at a time, several with commas; prompts * n by default
    mini_batches     optimizer steps per training step
    micro_batch      sequences per forward and backward; all of a mini-batch by default
    group_size       group size of int4 weights; by default the largest of 128, 64, 32 that divides every input size
    master_dtype     fp32 or bf16, as optim.master_dtype
    launches         processes for each scheme and level; they take turns, and figures are medians over launches
    rounds           measured rounds per launch; the figure of a launch is their median
    warmup           rounds before the measured ones
    threads          number of threads on a CPU
    gpu_memory_utilization   the engine's share of a GPU's memory
    device           cuda or cpu; by default cuda if there is a GPU
    json             the file to write"""

    part: str
    device: str
    model: str
    layers: int | None = None
    schemes: tuple[str, ...] = ROLLOUT_SCHEMES
    levels: tuple[str, ...] = LEVELS[:3]
    prompts: int = 8
    n: int = 4
    prompt_length: int = 8
    response_length: tuple[int, ...] = (16,)
    batch: tuple[int, ...] = ()
    mini_batches: int = 1
    micro_batch: int | None = None
    group_size: int | None = None
    master_dtype: str = "fp32"
    launches: int = 3
    rounds: int = 1
    warmup: int = 2
    threads: int = 1
    gpu_memory_utilization: float = 0.5
    json: Path | None = None

    @classmethod
    def parse(cls, part: str, given: Sequence[str]) -> Arguments:
        """Read the arguments. Raise UserError if one is invalid, or if they do not fit together."""
        device = device_of(given)
        defaults = [f"device={device}", f"model={'SmolLM2-135M' if device == 'cpu' else 'Qwen3-8B'}"]
        choices = {"device": DEVICES, "schemes": ROLLOUT_SCHEMES, "levels": LEVELS, "master_dtype": MASTER_DTYPES}
        arguments = read(cls, [*defaults, *given], choices, part=part)
        _check(arguments)
        return arguments

    @property
    def source(self) -> Source:
        return find_model(self.model)

    @property
    def depth(self) -> int:
        return self.layers or self.source.layers

    @property
    def sequences(self) -> int:
        return self.prompts * self.n

    @property
    def batches(self) -> tuple[int, ...]:
        return self.batch or (self.sequences,)

    @property
    def micro_batch_size(self) -> int:
        return self.micro_batch or self.sequences // self.mini_batches

    @property
    def weight_group(self) -> int:
        return self.group_size or default_group_size(self.source.size)

    def cases(self) -> list[Case]:
        """Return the cases in order, BF16 first. BF16 has no case `linears`, which would be the same as `off`."""
        schemes = sorted(set(self.schemes), key=ROLLOUT_SCHEMES.index)
        if self.part in ("rollout", "publish"):
            return [Case(scheme, "") for scheme in schemes]
        levels = sorted(set(self.levels), key=LEVELS.index)
        return [Case(s, level) for s in schemes for level in levels if (s, level) != ("bf16", "linears")]


def _check(arguments: Arguments) -> None:
    source, where = arguments.source, f"qarl.bench {arguments.part}"
    if arguments.n < 2:
        raise UserError("n must be 2 or more", where=where, why="advantages compare the responses to one prompt")
    if min(arguments.response_length) < 2:
        raise UserError("response_length must be 2 or more", where=where, why="the first token comes from the prefill")
    if arguments.depth > source.layers:
        raise UserError(f"layers={arguments.layers}, but {source.name} has only {source.layers}", where=where)
    positions = source.config.get("max_position_embeddings")
    wanted = arguments.prompt_length + max(arguments.response_length)
    if positions and wanted > positions:
        what = f"prompt_length + response_length = {wanted}, but the model has only {positions} positions"
        raise UserError(what, where=where)
    check_divides(arguments, "mini_batches", "prompts")
    if arguments.part != "rollout" and (len(arguments.response_length) > 1 or arguments.batch):
        raise UserError("only rollout takes batch or several response lengths", where=where,
                        fix="python -m qarl.bench rollout batch=... response_length=...")  # fmt: skip
    if source.size.experts:
        raise UserError(
            f"{source.name} is a mixture of experts", where=where, why="this benchmark supports only dense models",
            fix=f"run kernels model={source.name} for its layers, or plan model={source.name} for a step",
        )  # fmt: skip


KEYS = Arguments
