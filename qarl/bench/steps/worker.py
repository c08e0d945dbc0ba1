"""One scheme at one depth in a process of its own, which does what it is told over a pipe and sleeps in between.

vLLM keeps process-wide state, so two engines cannot share a process; and a scheme whose process has ended would be
measured minutes away from the next. So all live side by side and the parent wakes them in turn.

    {"do": "step", "level": LEVEL}                     a training step
    {"do": "warm", "level": LEVEL}                     what is the level's own of a step, uncounted: no rollout
    {"do": "trainer_step", "level": LEVEL}             its old log-probs and update, without an engine
    {"do": "publish_step"}                             quantize and publish
    {"do": "rollout_step", "batch": B, "length": R}    a prefill, and a rollout of B sequences
    {"do": "last_round"}                               nothing: it is answered {}. From here on peaks are each phase's
                                                       own, steps are slow, and linears are compared once more

Else the answer is {"phases", "peak_bytes", "checks"}; an exception is answered as {"error": text}.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers.utils import logging

from qarl.bench.steps.arguments import Arguments
from qarl.bench.steps.compare import (
    SEQUENCES,
    TOKENS,
    abs_mean,
    as_batch,
    beside_dequantized,
    bound_of,
    compare_with_engine,
    first_abs_median,
    log_probs,
    move_weights,
    sample,
    sampled,
)
from qarl.bench.steps.meter import Memory, Meter
from qarl.bench.steps.trainer import BenchTrainer, TrainerAlone, at_level, bench_config, random_prompts
from qarl.errors import UserError
from qarl.process import keep_freed_memory
from qarl.quant.phases import measure_phases
from qarl.rollout.engine import RolloutBatch, RolloutEngine, SamplingConfig
from qarl.rollout.publish.manifest import PublishReport, quantized_layers
from qarl.trainer.local import publish_metrics
from qarl.trainer.policy import Policy
from qarl.trainer.setup import engine_config

Answer = dict[str, Any]
ROUTERS = r"re:.*mlp\.gate$"
PUBLISH_PARTS = ("quantize", "pack", "prepare", "validate", "transfer", "apply")


def serve(connection: Connection, arguments: Arguments, scheme: str, layers: int, folder: str) -> None:
    """The process: build, answer "ready" with what was built, then one answer a command until the pipe closes."""
    logging.disable_progress_bar()
    kept = arguments.device == "cpu" and keep_freed_memory()
    try:
        experts = arguments.source.has_experts
        bench = (ExpertsRolloutBench if experts else BENCHES[arguments.part])(arguments, scheme, layers, folder)
        connection.send({"ready": bench.describe() | {"keeps_freed_memory": kept}})
    except Exception as error:
        connection.send({"error": _reason(error)})
        return
    while True:
        try:
            command = connection.recv()
        except EOFError:
            return
        try:
            connection.send(getattr(bench, command.pop("do"))(**command))
        except Exception as error:
            connection.send({"error": _reason(error)})


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):
        return "; ".join(part for part in (error.what, error.where, error.why) if part)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename.rpartition('/')[2]}:{place.lineno})"


class Bench:
    """What every process does. `compared`: level -> the checks beside the engine, see `_compare`."""

    timer: Meter
    compared: dict[str, Answer]

    def last_round(self) -> Answer:
        self.timer.memory.trim = True
        self.compared.clear()
        return {}

    def _compared_once(self, level: str) -> Answer:
        """In the first round and the last, neither of which is counted; in the others what the first one found."""
        if level not in self.compared:
            self.compared[level] = self._compare(level)
        return self.compared[level]

    def _compare(self, level: str) -> Answer:
        raise NotImplementedError


class StepBench(Bench):
    """Training steps of one scheme at every level."""

    trainer_class: type[BenchTrainer] = BenchTrainer

    def __init__(self, arguments: Arguments, scheme: str, layers: int, folder: str) -> None:
        self.arguments, self.scheme, self.layers = arguments, scheme, layers
        self.trainer = self.trainer_class(arguments, scheme, folder)
        self.timer = self.trainer.timer
        self.levels = {level: policy.align for level, policy in self.trainer.policies.items()}
        self.compared = {}
        if self.trainer_class is BenchTrainer:
            self.trainer.publish()

    def describe(self) -> Answer:
        model = self.trainer.policy.model
        engine = self.trainer.engine
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "levels": self.levels,
            "kernels": sorted({layer.kernel.name for layer in self._layers().values()}),
            "engine_kernels": engine_kernels(engine) if engine else [],
            "memory": self.trainer.timer.memory.source,
        }

    def _layers(self) -> Mapping[str, Any]:
        return next(reversed(self.trainer.policies.values())).quantized_layers()

    def step(self, level: str) -> Answer:
        trainer = self.trainer
        trainer.use(level)
        trainer.prefill()
        seconds, metrics = self._timed(trainer.train_step)
        answer = self._answer(level, seconds, metrics)
        phases = answer["phases"]
        phases["decode"] = phases["rollout"] - phases["prefill"]
        phases["publish_share"] = phases["publish"] / phases["step"]
        answer["checks"] |= self._mismatch(level, metrics) | self._compared_once(level)
        return answer

    def warm(self, level: str) -> Answer:
        """A step of `level` on the batch of the step before: what is left cold after another level's step."""
        trainer = self.trainer
        assert trainer.batch is not None
        trainer.use(level)
        trainer.update(trainer.batch, trainer.old_log_probs(trainer.batch))
        trainer.publish()
        trainer.timer.take()
        return {"phases": {}, "peak_bytes": {}, "checks": self._compared_once(level)}

    def trainer_step(self, level: str) -> Answer:
        assert isinstance(self.trainer, TrainerAlone)
        self.trainer.use(level)
        answer = self._answer(level, *self._timed(self.trainer.trainer_step))
        answer["checks"] |= self._compared_once(level)
        return answer

    def _timed(self, call: Callable[[], dict[str, float]]) -> tuple[float, dict[str, float]]:
        self.trainer.synchronize()
        start = time.perf_counter()
        metrics = call()
        self.trainer.synchronize()
        return time.perf_counter() - start, metrics

    def _answer(self, level: str, seconds: float, metrics: Mapping[str, float]) -> Answer:
        inclusive, own, peaks = self.trainer.timer.take()
        inclusive.pop("step")
        phases = {**inclusive, "step": seconds, "optimizer": own["optimizer"]}
        phases["sum"] = sum(value for name, value in own.items() if name not in ("prefill", "update", "reward"))
        phases |= {f"publish.{part}": metrics[f"publish/{part}_s"] for part in PUBLISH_PARTS if "publish" in inclusive}
        quantized = self.trainer.policy.quantized_layers()
        converted = self.scheme != "bf16" and level != "off"
        checks = {
            "level_applied": self.levels[level],
            "grad_norm": metrics["actor/grad_norm"],
            "kernels": sorted({layer.kernel.name for layer in quantized.values()}),
            "quantized_layers": len(quantized),
            "expected_layers": 7 * self.layers if converted else 0,
        }
        return {"phases": phases, "peak_bytes": {**peaks, "step": max(peaks.values())}, "checks": checks}

    def _compare(self, level: str) -> Answer:
        """At the weights that a step has moved and published. At `off` the engine is compared with a trainer whose
        linears are quantized: it must be right there too."""
        trainer, applied = self.trainer, self.levels[level]
        policy = self._below() if level == "off" else trainer.policies[level]
        prompts = [prompt.prompt_token_ids for prompt in trainer.parts.train_prompts]
        batch = sample(trainer.engine, prompts, self.arguments.response_length[0])
        checks = compare_with_engine(policy, trainer.engine, batch, self.layers)
        if applied in ("model", "exact"):
            unaligned = log_probs(self._below(), batch)
            checks["first_abs_median_below"] = first_abs_median(unaligned, sampled(batch), batch)
        return checks

    def _below(self) -> Policy:
        """What levels `model` and `exact` add to: the engine's linears, the rest as transformers computes it."""
        return at_level(self.trainer.plain, "off" if self.scheme == "bf16" else "linears")

    def _mismatch(self, level: str, metrics: Mapping[str, float]) -> Answer:
        batch = self.trainer.batch
        assert batch is not None
        rollout = sampled(batch)
        return {
            "mismatch_abs_mean": metrics["mismatch/abs_mean"],
            "mismatch_abs_max": metrics["mismatch/abs_max"],
            "mismatch_k3": metrics["mismatch/k3"],
            "mismatch_bound": bound_of(self.trainer.policies[level], self.layers, rollout),
            "log_prob_spread": float(rollout.std()),
            "response_lengths": batch.response_mask.sum(1).tolist(),
            "response_length": self.arguments.response_length[0],
            "published_mbytes": metrics["publish/mbytes"],
            "quantized_ratio": metrics["publish/quantized_ratio"],
        }


class TrainerBench(StepBench):
    trainer_class = TrainerAlone

    def _compare(self, level: str) -> Answer:
        """Without an engine: linears with the product of what they would publish, higher levels with `linears`."""
        trainer = self.trainer
        assert isinstance(trainer, TrainerAlone)
        policy, batch = trainer.policies[level], trainer.random_batch(SEQUENCES, TOKENS)
        found, checks = beside_dequantized(policy, batch)
        checks |= {"layers_expected": len(policy.quantized_layers()), "sample_spread": float(found.std())}
        if self.levels[level] in ("model", "exact"):
            below = self._below()
            other = log_probs(below, batch)
            checks |= {
                "sample_abs_mean": abs_mean(found, other),
                "sample_bound": bound_of(below, self.layers, other),
                "sample_against": f"level {below.align}",
            }
        return checks


class EngineBench(Bench):
    """An engine and the weights it is given, without an optimizer. The trainer's model is at `linears`, where its
    quantized layers must give what the engine's give."""

    def __init__(self, arguments: Arguments, scheme: str, layers: int, folder: str) -> None:
        self.arguments, self.scheme, self.layers = arguments, scheme, layers
        level = "off" if scheme == "bf16" else "linears"
        config = bench_config(arguments, scheme, level, folder)
        self.policy = Policy.load(config)
        self.vocab_size = int(self.policy.model.config.vocab_size)
        self.engine = RolloutEngine(engine_config(config))
        device = self.policy.device
        self.timer = Meter(Memory(device), torch.cuda.synchronize if device.type == "cuda" else None)
        self.version = 0
        self._publish()
        self.timer.take()
        self.compared = {}

    def describe(self) -> Answer:
        layers = self.policy.quantized_layers().values()
        return {
            "parameters": sum(parameter.numel() for parameter in self.policy.model.parameters()),
            "levels": {},
            "kernels": sorted({layer.kernel.name for layer in layers}),
            "engine_kernels": engine_kernels(self.engine),
            "memory": self.timer.memory.source,
        }

    def _publish(self) -> PublishReport:
        with self.timer.phase("quantize"):
            tensors = self.policy.quantize()
        with self.timer.phase("publish"):
            report = self.engine.publish(tensors, version=self.version)
        self.version += 1
        return report

    def _compare(self, level: str = "") -> Answer:
        prompts = random_prompts(self.arguments, self.vocab_size, SEQUENCES)
        batch = sample(self.engine, prompts, max(self.arguments.response_length))
        return compare_with_engine(self.policy, self.engine, batch, self.layers)

    def publish_step(self) -> Answer:
        """A publish of weights that the engine does not have yet, and then whether it has them."""
        move_weights(self.policy, self.version)
        self.timer.take()
        with measure_phases() as quantizing:
            report = self._publish()
        seconds, _, peaks = self.timer.take()
        metrics = publish_metrics(report, quantizing)
        seconds |= {f"publish.{part}": metrics[f"publish/{part}_s"] for part in PUBLISH_PARTS}
        expected = 7 * self.layers if self.scheme != "bf16" else 0
        checks = {
            "published_mbytes": metrics["publish/mbytes"],
            "quantized_layers": len(quantized_layers(self.engine.expected)),
            "expected_layers": expected,
        }
        return {"phases": seconds, "peak_bytes": peaks, "checks": checks | self._compare()}

    def rollout_step(self, batch: int, length: int) -> Answer:
        prompts = random_prompts(self.arguments, self.vocab_size, batch)
        self.timer.take()
        for phase, tokens in (("prefill", 1), ("rollout", length)):
            self.engine.reset_prefix_cache()
            with self.timer.phase(phase):
                sampling = SamplingConfig(tokens, ignore_eos=True)
                responses = self.engine.generate(prompts, sampling, list(range(batch)))
        lengths = [len(response) for response in responses.response_token_ids]
        seconds, _, peaks = self.timer.take()
        seconds["decode"] = seconds["rollout"] - seconds["prefill"]
        checks = {"response_lengths": lengths, "response_length": length} | self._mismatch(responses)
        return {"phases": seconds, "peak_bytes": peaks, "checks": checks}

    def _mismatch(self, responses: RolloutBatch) -> Answer:
        """Of the first few of `responses`; their tokens may be too few to tell a spread by."""
        compared, batch = self._compared_once(""), as_batch(responses)
        rollout, spread = sampled(batch), compared["sample_spread"]
        return compared | {
            "mismatch_abs_mean": abs_mean(log_probs(self.policy, batch), rollout),
            "mismatch_bound": bound_of(self.policy, self.layers, rollout, spread=spread),
        }


class DummyEngine(RolloutEngine):
    """vLLM on the dummy weights it starts with: for models that cannot be published to yet. Its speed is the same."""

    def _prepare_publish(self) -> None:
        """Nothing will be published."""

    @property
    def weight_version(self) -> int:
        return 0


class ExpertsRolloutBench(EngineBench):
    """Rollouts of a mixture of experts; routers stay unquantized.

    There is no trainer's model of such a scheme to compare with, and the weights are vLLM's dummy ones. All that is
    checked: the engine's log-probs are finite (`RolloutEngine.generate` raises) and the responses as long as asked.
    """

    def __init__(self, arguments: Arguments, scheme: str, layers: int, folder: str) -> None:
        self.arguments, self.scheme, self.layers = arguments, scheme, layers
        config = engine_config(bench_config(arguments, scheme, "off", folder))
        self.compared = {}
        self.engine = DummyEngine(dataclasses.replace(config, ignore=(*config.ignore, ROUTERS)))
        self.vocab_size = int(arguments.source.config["vocab_size"])
        device = next(self.engine.model().parameters()).device
        self.timer = Meter(Memory(device), torch.cuda.synchronize if device.type == "cuda" else None)

    def describe(self) -> Answer:
        return {
            "parameters": sum(tensor.numel() for tensor in self.engine.model().parameters()),
            "levels": {},
            "kernels": [],
            "engine_kernels": engine_kernels(self.engine),
            "memory": self.timer.memory.source,
            "weights": "vLLM's dummy ones",
        }

    def _mismatch(self, responses: RolloutBatch) -> Answer:
        return {}


def engine_kernels(engine: RolloutEngine) -> list[str]:
    """Class names of the kernels that vLLM's quantized linears run; empty where it has none."""
    found = set()
    for module in engine.model().modules():
        scheme = getattr(module, "scheme", None)
        if scheme is not None:
            found.add(type(getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None) or scheme).__name__)
    return sorted(found)


BENCHES: dict[str, Callable[[Arguments, str, int, str], Any]] = {
    "steps": StepBench,
    "trainer": TrainerBench,
    "rollout": EngineBench,
    "publish": EngineBench,
}
