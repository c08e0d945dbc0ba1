"""Arguments of `ceilings` and `plan`: key=value, checked before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qarl.bench.arguments import key_values, names, numbers, one_of
from qarl.bench.steps.models import default_group_size, find_model
from qarl.errors import UserError
from qarl.process import limit_threads

SCHEMES = ("bf16", "w8a8", "fp8", "w4a16")
GPUS = ("h100", "h200", "h800", "a100", "cpu")
MASTER_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class CeilingsArguments:
    """
    json       the file to write
    schemes    bf16,w8a8,fp8,w4a16
    rounds     calls of each operation
    threads    of the CPU
    """

    json: Path
    schemes: tuple[str, ...] = SCHEMES
    rounds: int = 4
    threads: int = 1

    @classmethod
    def parse(cls, given: Sequence[str]) -> CeilingsArguments:
        """Raises UserError for what is not key=value, no key, or no value of its key."""
        values = key_values(given, {field.name for field in dataclasses.fields(cls)} | {"device"})
        if values.get("device", "cpu") != "cpu":
            raise UserError(
                f"ceilings are not measured on device={values['device']}",
                where="qarl.bench ceilings",
                why="engine and attention are called by the CPU's operators here",
                fix="device=cpu; plan gpu=h100 works from data sheets, and says so",
            )
        if "json" not in values:
            raise UserError("where shall the ceilings go?", where="qarl.bench ceilings", fix="json=FILE")
        return cls(
            json=Path(values["json"]),
            schemes=names(values, "schemes", SCHEMES, SCHEMES),
            rounds=positive(values, "rounds", cls.rounds),
            threads=positive(values, "threads", cls.threads),
        )


@dataclass(frozen=True)
class PlanArguments:
    """
    model             a name of qarl/bench/models, or a folder
    gpu               h100, h200, h800, a100 by their data sheets; cpu needs `ceilings`
    ceilings          a file of measured ceilings, in place of a data sheet's
    gpus              altogether; tensor_parallel of them make an engine
    gpu_memory_utilization   of an engine, its weights and KV cache together
    scheme            bf16,w8a8,fp8,w4a16, or all
    level             of the low-bit schemes' second row: linears, or model; the first is off
    prompts, n        prompts of a step, and responses to each
    prompt_length     tokens
    response_length   tokens: mean, or mean,longest
    mini_batches      optimizer steps of a training step
    micro_batch, log_prob_micro_batch   rows of a forward
    group_size        of int4 weights
    master_dtype      fp32 or bf16
    seed              of the response lengths
    check             a file of `qarl.bench steps`: predicted beside measured, and nothing else
    tolerance         of a step in `check`
    json, plot        files to write
    """

    model: str = "Qwen3-8B"
    gpu: str = "h100"
    ceilings: Path | None = None
    gpus: int = 8
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.6
    scheme: tuple[str, ...] = SCHEMES
    level: str = "linears"
    prompts: int = 128
    n: int = 8
    prompt_length: int = 1024
    response_length: tuple[int, ...] = (2048, 8192)
    mini_batches: int = 4
    micro_batch: int = 4
    log_prob_micro_batch: int = 4
    group_size: int = 128
    master_dtype: str = "fp32"
    seed: int = 0
    check: Path | None = None
    tolerance: float = 0.2
    json: Path | None = None
    plot: Path | None = None

    @classmethod
    def parse(cls, given: Sequence[str]) -> PlanArguments:
        """Raises UserError for what is not key=value, no key, no value of its key, or does not fit together."""
        values = key_values(given, {field.name for field in dataclasses.fields(cls)})
        if "check" in values and "ceilings" not in values:
            raise UserError("check needs measured ceilings", where="check", fix="ceilings=FILE")
        gpu = values.get("gpu") or ("cpu" if "ceilings" in values else "h100")
        one_of(gpu, GPUS, "gpu")
        if gpu == "cpu" and "ceilings" not in values:
            raise UserError("gpu=cpu has no data sheet", where="gpu", fix="ceilings=FILE, from qarl.bench ceilings")
        source = find_model(values.get("model", cls.model))
        chosen = "" if values.get("scheme") == "all" else values.get("scheme", "")
        try:
            lengths = numbers(values["response_length"]) if "response_length" in values else cls.response_length
            arguments = cls(
                model=values.get("model", cls.model),
                gpu=gpu,
                ceilings=Path(values["ceilings"]) if "ceilings" in values else None,
                gpus=positive(values, "gpus", 1 if gpu == "cpu" else cls.gpus),
                tensor_parallel=positive(values, "tensor_parallel", 1),
                gpu_memory_utilization=float(values.get("gpu_memory_utilization", cls.gpu_memory_utilization)),
                scheme=names({"scheme": chosen} if chosen else {}, "scheme", SCHEMES, SCHEMES),
                level=values.get("level", cls.level),
                prompts=positive(values, "prompts", cls.prompts),
                n=positive(values, "n", cls.n),
                prompt_length=positive(values, "prompt_length", cls.prompt_length),
                response_length=(lengths[0], lengths[-1]),
                mini_batches=positive(values, "mini_batches", cls.mini_batches),
                micro_batch=positive(values, "micro_batch", cls.micro_batch),
                log_prob_micro_batch=positive(values, "log_prob_micro_batch", cls.log_prob_micro_batch),
                group_size=positive(values, "group_size", default_group_size(source.config)),
                master_dtype=values.get("master_dtype", cls.master_dtype),
                seed=int(values.get("seed", cls.seed)),
                check=Path(values["check"]) if "check" in values else None,
                tolerance=float(values.get("tolerance", cls.tolerance)),
                json=Path(values["json"]) if "json" in values else None,
                plot=Path(values["plot"]) if "plot" in values else None,
            )
        except ValueError as error:
            fix = "numbers: gpus=8 response_length=2048,8192"
            raise UserError(str(error), where="qarl.bench plan", fix=fix) from error
        _check(arguments, len(lengths))
        return arguments


def _check(arguments: PlanArguments, lengths: int) -> None:
    where = "qarl.bench plan"
    one_of(arguments.level, ("linears", "model"), "level")
    one_of(arguments.master_dtype, MASTER_DTYPES, "master_dtype")
    if not 0 < arguments.gpu_memory_utilization <= 1:
        raise UserError("gpu_memory_utilization must be above 0 and at most 1", where=where)
    if lengths > 2:
        raise UserError("response_length has more than two numbers", where=where, fix="response_length=MEAN,LONGEST")
    if arguments.gpus % arguments.tensor_parallel:
        raise UserError(f"{arguments.gpus} GPUs do not make engines of {arguments.tensor_parallel}", where=where,
                        fix="tensor_parallel must divide gpus")  # fmt: skip
    if arguments.prompts % arguments.mini_batches:
        raise UserError(f"{arguments.prompts} prompts do not make {arguments.mini_batches} mini-batches", where=where,
                        fix="mini_batches must divide prompts")  # fmt: skip
    if arguments.prompts * arguments.n < arguments.gpus:
        raise UserError(f"{arguments.prompts * arguments.n} responses for {arguments.gpus} GPUs", where=where,
                        fix="more prompts, or fewer gpus")  # fmt: skip


def positive(values: Mapping[str, str], key: str, default: int) -> int:
    """A whole number of 1 or more. Raises UserError."""
    text = values.get(key, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{key}={text} is no whole number of 1 or more", where=key)
    return int(text)


def run_ceilings(part: str, given: Sequence[str]) -> int:
    """`python -m qarl.bench ceilings`; the exit code."""
    arguments = CeilingsArguments.parse(given)
    limit_threads(arguments.threads)
    from qarl.bench.cost.measure import run

    return run(arguments)


def run_plan(part: str, given: Sequence[str]) -> int:
    """`python -m qarl.bench plan`; the exit code."""
    arguments = PlanArguments.parse(given)
    if arguments.check:
        from qarl.bench.cost.check import run_check

        return run_check(arguments)
    from qarl.bench.cost.plan import run

    return run(arguments)
