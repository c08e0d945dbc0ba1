"""One launch: a process that builds one scheme at one level, warms up, checks the linears, and times a few rounds.

vLLM keeps process-wide state, so each engine needs its own process. The spread over launches therefore includes
differences between processes, such as memory pages. A process sends one answer and exits.
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
from transformers.utils import logging

from qarl.bench.steps.arguments import Arguments, Case
from qarl.bench.steps.check import WrongNumbers, check_linears
from qarl.bench.steps.setup import config_of, make_trainer, move_weights, random_batch, random_tokens
from qarl.errors import UserError
from qarl.metrics.mismatch import PhaseTimer
from qarl.process import keep_freed_memory
from qarl.quant.timing import measure_phases
from qarl.rollout.engine import RolloutEngine, SamplingConfig
from qarl.trainer.local import publish_metrics
from qarl.trainer.policy import Policy
from qarl.trainer.setup import engine_config

Answer = dict[str, Any]
Phases = dict[str, float]
"""Phase -> seconds."""
PUBLISH_PARTS = ("quantize", "pack", "prepare", "validate", "transfer", "apply")


def answer(connection: Connection, arguments: Arguments, case: Case, folder: str) -> None:
    """Run the process: send {"rounds", "peak_bytes", ...} or {"error": text}, and exit."""
    logging.disable_progress_bar()
    try:
        connection.send(measure(arguments, case, folder))
    except Exception as error:
        connection.send({"error": _reason(error)})
    os._exit(0)  # nothing is left to do, and shutting an engine down takes long and prints a lot


def measure(arguments: Arguments, case: Case, folder: str) -> Answer:
    kept = arguments.device == "cpu" and keep_freed_memory()
    bench = BENCHES[arguments.part](arguments, case, folder)
    for _ in range(arguments.warmup):
        bench.round()
    check_linears(bench.policy, bench.engine)
    rounds = [bench.round() for _ in range(arguments.rounds)]
    return {"rounds": rounds, "peak_bytes": peak_bytes(), "keeps_freed_memory": kept} | bench.facts()


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
        metrics = publish_metrics(report, quantizing)
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
