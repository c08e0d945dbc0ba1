"""One launch: a process that builds one scheme at one level, warms up, checks the linears, and times a few rounds.

vLLM keeps process-wide state, so each engine needs its own process. The spread over launches therefore includes
differences between processes, such as memory pages. A process sends one answer and exits.

`check_linears` compares every linear of the decoder layers, in trainer and engine, with a reference before anything is
timed. The reference quantizes the trainer's BF16 weight and multiplies in exact PyTorch (`qarl.kernels.reference`). So
the check finds an unpublished weight and a wrong kernel, even one that multiplies in BF16 instead of int8 (int8 changes
results by 0.6%). If the mismatch (mean |δ|) is over its limit, the trainer ends the launch.
"""

from __future__ import annotations

import os
import resource
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import logging

from qarl.bench.steps import Arguments, Case
from qarl.bench.workload import config_of, make_trainer, move_weights, random_batch, random_tokens
from qarl.checks.layers import FUSED_LAYERS
from qarl.errors import UserError
from qarl.kernels.registry import LINEAR_KERNELS
from qarl.metrics.mismatch import PhaseTimer
from qarl.process import keep_freed_memory
from qarl.quant.linear import QuantLinear
from qarl.quant.quantize import measure_phases, quantize
from qarl.quant.scheme import Scheme
from qarl.rollout.engine import RolloutEngine, SamplingConfig
from qarl.trainer.policy import Policy
from qarl.trainer.setup import engine_config

ROWS = 16
ALLOWED, ALLOWED_FP8 = 5e-3, 1e-2
"""Allowed relative error (root mean square) of two BF16 results. Each is rounded, and a few 8-bit codes may differ by
one; FP8 tensor cores sum in fewer bits."""
PARTS = {**FUSED_LAYERS, "o_proj": ("o_proj",), "down_proj": ("down_proj",)}
"""vLLM's linears of a decoder layer -> the trainer's linears that each one fuses."""
LEAVES = {part for parts in PARTS.values() for part in parts}
Answer = dict[str, Any]
Phases = dict[str, float]
"""Phase -> seconds."""
PUBLISH_PARTS = ("quantize", "pack", "prepare", "validate", "transfer", "apply")


class WrongNumbers(Exception):
    """A linear differs from the reference, so the case (scheme and level) gets no figures."""


def answer(connection: Connection, arguments: Arguments, case: Case, folder: str) -> None:
    """Run the process: send {"rounds", "peak_bytes", ...} or {"error": text}, and exit."""
    logging.disable_progress_bar()
    try:
        connection.send(measure(arguments, case, folder))
    except Exception as error:
        connection.send({"error": _reason(error)})
    os._exit(0)  # nothing is left to do, and shutting an engine down takes long and prints a lot


def measure(arguments: Arguments, case: Case, folder: str) -> Answer:
    if arguments.device == "cpu":
        keep_freed_memory()
    bench = BENCHES[arguments.part](arguments, case, folder)
    for _ in range(arguments.warmup):
        bench.round()
    check_linears(bench.policy, bench.engine)
    rounds = [bench.round() for _ in range(arguments.rounds)]
    return {"rounds": rounds, "peak_bytes": peak_bytes()} | bench.facts()


def peak_bytes() -> int:
    """Return the peak memory of this process: PyTorch's (including vLLM's) on a GPU, or resident memory on a CPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reason(error: Exception) -> str:
    if isinstance(error, WrongNumbers):
        return str(error)
    if isinstance(error, UserError):
        return "; ".join(part for part in (error.what, error.where, error.why) if part)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename.rpartition('/')[2]}:{place.lineno})"


class Bench:
    """Base class of the measurements. Each launch makes one object, of the class for its command."""

    policy: Policy
    engine: RolloutEngine | None

    def round(self) -> dict[tuple[int, int], Phases]:
        """Measure once. Return (batch, response length) -> seconds by phase. The key is (0, 0) except in `rollout`."""
        raise NotImplementedError

    def facts(self) -> Answer:
        kernels = sorted({layer.kernel.name for layer in self.policy.quantized_layers().values()})
        return {"level_applied": self.policy.align, "kernels": kernels}


class StepBench(Bench):
    """Training steps."""

    def __init__(self, arguments: Arguments, case: Case, folder: str) -> None:
        self.length = arguments.response_length[0]
        self.trainer = make_trainer(arguments, case, folder, engine=True)
        self.policy, self.engine = self.trainer.policy, self.trainer.engine
        self.trainer.publish()

    def round(self) -> dict[tuple[int, int], Phases]:
        trainer = self.trainer
        prefill = self._prefill()
        trainer.timer.pop()
        start = time.perf_counter()
        metrics = trainer.train_step()
        seconds = time.perf_counter() - start
        if {metrics["response_length/min"], metrics["response_length/max"]} != {self.length}:
            raise WrongNumbers(f"responses are not {self.length} tokens long")
        _check_update(metrics)
        phases = _phases(trainer.timer)
        return {(0, 0): phases | {"step": seconds, "prefill": prefill, "decode": phases["rollout"] - prefill}}

    def _prefill(self) -> float:
        """Return the seconds of a step's prefill, measured by generating only one token per response."""
        trainer, rollout = self.trainer, self.trainer.config.rollout
        prompts = [prompt.prompt_token_ids for prompt in trainer.parts.train_prompts for _ in range(rollout.n)]
        trainer.engine.reset_prefix_cache()
        start = time.perf_counter()
        trainer.generate(prompts, SamplingConfig(1, rollout.temperature), list(range(len(prompts))))
        seconds = time.perf_counter() - start
        trainer.engine.reset_prefix_cache()
        return seconds


class TrainerBench(Bench):
    """Old log-probs and update of a random batch, without an engine. The rollout log-probs are the trainer's own."""

    def __init__(self, arguments: Arguments, case: Case, folder: str) -> None:
        self.trainer = make_trainer(arguments, case, folder, engine=False)
        self.policy, self.engine = self.trainer.policy, None
        self.policy.requantize()
        self.batch = random_batch(self.trainer)

    def round(self) -> dict[tuple[int, int], Phases]:
        trainer = self.trainer
        with trainer.timer.phase("old_log_prob"):
            old_log_probs = trainer.old_log_probs(self.batch)
        self.batch.rollout_log_probs = old_log_probs
        with trainer.timer.phase("update"):
            metrics = trainer.update(self.batch, old_log_probs)
        _check_update(metrics)
        return {(0, 0): _phases(trainer.timer)}


class PublishBench(Bench):
    """Publish weights to an engine, without an optimizer. The weights change before every publish."""

    engine: RolloutEngine

    def __init__(self, arguments: Arguments, case: Case, folder: str) -> None:
        self.arguments = arguments
        config = config_of(arguments, case, folder)
        self.policy = Policy.load(config)
        self.engine = RolloutEngine(engine_config(config, level=self.policy.align))
        self.timer = PhaseTimer(torch.cuda.synchronize if torch.cuda.is_available() else None)
        self.version = 0
        self.publish()

    def publish(self) -> Phases:
        with measure_phases() as quantizing:
            with self.timer.phase("quantize"):
                tensors = self.policy.quantize()
            with self.timer.phase("publish"):
                report = self.engine.publish(tensors, version=self.version)
        self.version += 1
        metrics = report.metrics(quantizing)
        return _phases(self.timer) | {f"publish.{part}": metrics[f"publish/{part}_s"] for part in PUBLISH_PARTS}

    def round(self) -> dict[tuple[int, int], Phases]:
        move_weights(self.policy, self.version)
        return {(0, 0): self.publish()}


class RolloutBench(PublishBench):
    """Rollouts of several batches and lengths."""

    def round(self) -> dict[tuple[int, int], Phases]:
        sizes = [(b, length) for length in self.arguments.response_length for b in self.arguments.batches]
        return {size: self._rollout(*size) for size in sizes}

    def _rollout(self, batch: int, length: int) -> Phases:
        prompts = random_tokens(int(self.policy.model.config.vocab_size), batch, self.arguments.prompt_length)
        for phase, tokens in (("prefill", 1), ("rollout", length)):
            self.engine.reset_prefix_cache()
            with self.timer.phase(phase):
                found = self.engine.generate(prompts, SamplingConfig(tokens), list(range(batch)))
        if {len(response) for response in found.response_token_ids} != {length}:
            raise WrongNumbers(f"responses are not {length} tokens long")
        phases = _phases(self.timer)
        prefill, rollout = phases["prefill"], phases["rollout"]
        return {"prefill": prefill, "rollout": rollout, "decode": rollout - prefill}


def _phases(timer: PhaseTimer) -> Phases:
    return {name.removeprefix("timing_s/"): seconds for name, seconds in timer.pop().items()}


def _check_update(metrics: dict[str, float]) -> None:
    if metrics["actor/skipped_steps"]:
        raise WrongNumbers("the gradient is not finite")


BENCHES: dict[str, Callable[[Arguments, Case, str], Bench]] = {
    "steps": StepBench,
    "trainer": TrainerBench,
    "rollout": RolloutBench,
    "publish": PublishBench,
}


@torch.no_grad()
def check_linears(policy: Policy, engine: RolloutEngine | None) -> None:
    """Raise WrongNumbers for the first linear whose error is too large."""
    kernels = {layer.kernel.name for layer in policy.quantized_layers().values()}
    if "reference" in kernels:
        raise WrongNumbers("the trainer's linears run the reference kernel, because no fast kernel can serve here")
    theirs = {} if engine is None else dict(engine.model().named_modules())
    modules: dict[str, Any] = dict(policy.model.named_modules())
    ours = {name: module for name, module in modules.items() if name.rpartition(".")[2] in LEAVES}
    for block in dict.fromkeys(name.rpartition(".")[0] for name in ours):
        for fused, parts in PARTS.items():
            names = [f"{block}.{part}" for part in parts]
            linears: list[nn.Linear] = [ours[name] for name in names if name in ours]
            if not linears:  # `block` is an attention or an MLP, and `fused` belongs to the other
                continue
            module = theirs.get(f"{block}.{fused}")
            if engine is not None and module is None:
                raise WrongNumbers(f"the engine has no {block}.{fused} to compare with")
            _compare(names, linears, policy.scheme, module)


def _compare(names: list[str], linears: list[nn.Linear], scheme: Scheme, engines: nn.Module | None) -> None:
    generator = torch.Generator(linears[0].weight.device).manual_seed(0)
    shape = (ROWS, linears[0].in_features)
    x = torch.randn(shape, generator=generator, device=linears[0].weight.device).bfloat16()
    expected = [reference(linear, scheme, x) for linear in linears]
    allowed = ALLOWED_FP8 if scheme.name == "fp8" else ALLOWED
    found = [("the trainer", linear(x)) if isinstance(linear, QuantLinear) else None for linear in linears]
    pairs = [(name, *one, true) for name, one, true in zip(names, found, expected, strict=True) if one]
    if engines is not None:
        outputs = engines(x)[0].split([true.shape[1] for true in expected], -1)
        pairs += [(name, "the engine", y, true) for name, y, true in zip(names, outputs, expected, strict=True)]
    for name, who, y, true in pairs:
        error = float((y.float() - true.float()).norm() / true.float().norm())
        if not error <= allowed:  # true for NaN, too
            raise WrongNumbers(f"{name}: {who} differs from the reference by {error:.1e}; {allowed:.1e} is allowed")


def reference(linear: nn.Linear, scheme: Scheme, x: torch.Tensor) -> torch.Tensor:
    """Return the output [ROWS, N] that `linear` must give for x [ROWS, K] under `scheme`."""
    if not scheme.quantized:
        bias = None if linear.bias is None else linear.bias.float()
        return F.linear(x.float(), linear.weight.float(), bias)
    kernel = LINEAR_KERNELS[scheme.name][-1]
    return kernel.linear(x, kernel.prepare(quantize(linear.weight, scheme).tensors), linear.bias)
