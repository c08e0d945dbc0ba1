"""One launch: a process that builds one case, warms up, checks the linears, and times a few rounds.

vLLM keeps process-wide state, so each engine needs its own process. The spread over launches therefore includes
differences between processes, such as memory pages. A process writes one answer and exits.

`check_linears` compares every linear of the decoder layers, in trainer and engine, with a reference before anything is
timed. The reference quantizes the trainer's BF16 weight and multiplies in exact PyTorch (`qarl.kernels.reference`). So
the check finds an unpublished weight and a wrong kernel, even one that multiplies in BF16 instead of int8 (int8 changes
results by 0.6%). With adapters it compares the bases, and the reference multiplies by the frozen low-bit tensors. If
the mismatch (mean |δ|) is over its limit, the trainer ends the launch.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import sys
import time
import traceback
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging

from qarl.bench.floor import Work, floor_phases
from qarl.bench.model import run_config
from qarl.bench.step_arguments import Arguments, Case
from qarl.checks.layers import FUSED_LAYERS
from qarl.checks.model_folder import load_tokenizer
from qarl.config import Config
from qarl.config.level import Level
from qarl.data.prompts import Prompt, PromptDataset, PromptSampler
from qarl.data.reward_workers import InProcessReward
from qarl.errors import UserError
from qarl.kernels.registry import reference_kernel
from qarl.metrics.phase_timer import PhaseTimer, clock_of
from qarl.process import keep_freed_memory
from qarl.quant.linear import QuantLinear
from qarl.quant.quantize import measure_phases, quantize
from qarl.quant.state_dict import low_bit_layers, requantize
from qarl.rollout.engine import RolloutEngine, SamplingConfig
from qarl.rollout.engine_config import CACHED_BLOCK
from qarl.rollout.requests import RolloutBatch
from qarl.schemes import Scheme, get_scheme
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.prepare import RunParts, engine_config

ROWS = 16
ALLOWED = {"bf16": 5e-3, "int8": 5e-3, "float8": 1e-2}
"""Allowed relative error (root mean square) of two BF16 results. Each is rounded, and a few 8-bit codes may differ by
one; FP8 tensor cores sum in fewer bits. By the number format of the activations."""
ALLOWED_OTHERWISE = 1e-2
"""The same for other number formats."""
PARTS = {**FUSED_LAYERS, "o_proj": ("o_proj",), "down_proj": ("down_proj",)}
"""vLLM's linears of a decoder layer -> the trainer's linears that each one fuses."""
Answer = dict[str, Any]
Phases = dict[str, float]
"""Phase -> seconds."""
PUBLISH_PARTS = ("quantize", "pack", "prepare", "validate", "apply")


class WrongNumbers(Exception):
    """A linear differs from the reference, so the case (scheme and level) gets no figures."""


def main(path: Path) -> None:
    """Read the arguments of a launch from `path`, write {"rounds", "peak_bytes", ...} or {"error": text}, and exit."""
    logging.disable_progress_bar()
    try:
        answer = measure(*pickle.loads(path.read_bytes()))
    except Exception as error:
        answer = {"error": _reason(error)}
    path.write_bytes(pickle.dumps(answer))
    os._exit(0)  # nothing is left to do, and shutting an engine down takes long and prints a lot


def measure(arguments: Arguments, case: Case, folder: str) -> Answer:
    if arguments.device == "cpu":
        keep_freed_memory()
    bench = BENCHES[arguments.part](arguments, case, folder)
    for _ in range(arguments.warmup):
        bench.round()
    check_linears(bench.policy, bench.engine)
    rounds = [bench.round() for _ in range(arguments.rounds)]
    layers = low_bit_layers(bench.policy.model).values()
    kernels = {layer.kernel.name for layer in layers}
    # PyTorch's memory, including vLLM's; on a CPU resident memory.
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "rounds": rounds,
        "peak_bytes": peak,
        "level_applied": bench.policy.align,
        "kernels": sorted(kernels),
    }


def _reason(error: Exception) -> str:
    if isinstance(error, UserError | WrongNumbers):
        return " ".join(str(error).split())
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"


class StepBench:
    """Training steps."""

    def __init__(self, arguments: Arguments, case: Case, folder: str) -> None:
        self.length = arguments.response_length
        self.work: Work | None = None
        self.trainer = make_trainer(arguments, case, folder, engine=True)
        self.policy = self.trainer.policy
        self.engine = self.trainer.engine
        if (
            arguments.device == "cpu" and not case.lora_r
        ):  # with adapters most weights have no gradient
            self.work = Work.of(
                self.policy.model,
                sequences=arguments.sequences,
                prompt=arguments.prompt_length,
                response=arguments.response_length,
                micro_batch=arguments.micro_batch_size,
                responses=arguments.n,
                cached=cached_tokens(self.engine, arguments.prompt_length),
                shared=self.policy.shared_prompt >= arguments.prompt_length,
            )
        self.trainer.publish()

    def round(self) -> Phases:
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
        phases |= {"step": seconds, "prefill": prefill, "decode": phases["rollout"] - prefill}
        return phases if self.work is None else phases | floor_phases(self.work)

    def _prefill(self) -> float:
        """Return the seconds of a step's prefill, measured by generating only one token per response."""
        trainer = self.trainer
        prompts = _repeated_prompts(trainer)
        one_token = SamplingConfig(1, trainer.config.rollout.temperature)
        seeds = list(range(len(prompts)))
        trainer.engine.reset_prefix_cache()
        start = time.perf_counter()
        trainer.generate(prompts, one_token, seeds)
        seconds = time.perf_counter() - start
        trainer.engine.reset_prefix_cache()
        return seconds


def cached_tokens(engine: RolloutEngine, prompt: int) -> int:
    """Return how many of the `prompt` tokens of a repeated prompt come from the engine's cache: whole blocks of all but
    the last token."""
    if not engine.config.enable_prefix_caching:
        return 0
    return (prompt - 1) // CACHED_BLOCK * CACHED_BLOCK


class TrainerBench:
    """Old log-probs and update of a random batch, without an engine. The rollout log-probs are the trainer's own."""

    def __init__(self, arguments: Arguments, case: Case, folder: str) -> None:
        self.trainer = make_trainer(arguments, case, folder, engine=False)
        self.policy = self.trainer.policy
        self.engine = None
        requantize(self.policy.model)
        self.batch = random_batch(self.trainer)

    def round(self) -> Phases:
        trainer = self.trainer
        with trainer.timer.phase("old_log_prob"):
            old_log_probs = trainer.old_log_probs(self.batch)
        self.batch.rollout_log_probs = old_log_probs
        with trainer.timer.phase("update"):
            metrics = trainer.update(self.batch, old_log_probs)
        _check_update(metrics)
        return _phases(trainer.timer)


class PublishBench:
    """Publish weights to an engine, without an optimizer. The weights change before every publish."""

    def __init__(self, arguments: Arguments, case: Case, folder: str) -> None:
        config = config_of(arguments, case, folder)
        self.policy = Policy.load(config)
        routing = self.policy.has_experts
        self.engine = RolloutEngine(engine_config(config, self.policy, routing=routing))
        self.timer = PhaseTimer(clock_of(self.policy.device))
        self.version = 0
        self.publish()

    def publish(self) -> Phases:
        with measure_phases() as quantizing, self.timer.phase("publish"):
            phase = self.timer.phase
            report = self.policy.publish(self.engine, version=self.version, phase=phase)
        self.version += 1
        metrics = report.metrics(quantizing)
        phases = _phases(self.timer)
        for part in PUBLISH_PARTS:
            phases[f"publish.{part}"] = metrics[f"publish/{part}_s"]
        return phases

    def round(self) -> Phases:
        move_weights(self.policy, self.version)
        return self.publish()


def _phases(timer: PhaseTimer) -> Phases:
    metrics = timer.pop()
    return {name.removeprefix("timing_s/"): seconds for name, seconds in metrics.items()}


def _check_update(metrics: dict[str, float]) -> None:
    if metrics["actor/skipped_steps"]:
        raise WrongNumbers("the gradient is not finite")


BENCHES: dict[str, type[StepBench | TrainerBench | PublishBench]] = {
    "steps": StepBench,
    "trainer": TrainerBench,
    "publish": PublishBench,
}
"""Part -> the class that a launch makes one object of. `round` measures once and returns seconds by phase."""


@torch.no_grad()
def check_linears(policy: Policy, engine: RolloutEngine | None) -> None:
    """Raise WrongNumbers for the first linear whose error is too large."""
    layers = low_bit_layers(policy.model).values()
    if any(layer.kernel.reference for layer in layers):
        raise WrongNumbers(
            "the trainer's linears run the reference kernel, because no fast kernel can serve here"
        )
    of_engine = {} if engine is None else dict(engine.model().named_modules())
    of_trainer: dict[str, Any] = dict(policy.model.named_modules())
    for name in of_trainer:
        block, _, leaf = name.rpartition(".")
        for fused, parts in PARTS.items():
            if leaf != parts[0]:
                continue
            names = [f"{block}.{part}" for part in parts]
            linears = {name: of_trainer[name] for name in names}
            fused_name = f"{block}.{fused}"
            wrapped = f"{fused_name}.base_layer"  # in vLLM's linear with adapters
            engine_linear = of_engine.get(wrapped)
            if of_engine and engine_linear is None:
                engine_linear = of_engine[fused_name]
            _compare(linears, policy, engine_linear)


def _compare(
    linears: dict[str, nn.Linear], policy: Policy, engine_linear: nn.Module | None
) -> None:
    """Compare the trainer's linears, and the engine's one that fuses them, with the reference."""
    scheme = policy.scheme
    device = policy.device
    first = next(iter(linears.values()))
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(ROWS, first.in_features, generator=generator, device=device).bfloat16()
    expected = {name: reference(linear, scheme, x) for name, linear in linears.items()}
    for name, linear in linears.items():
        if isinstance(linear, QuantLinear):
            output = QuantLinear.forward(linear, x)
            _check_output(f"{name}: the trainer", output, expected[name], scheme)
    if engine_linear is None:
        return
    widths = [output.shape[1] for output in expected.values()]
    parts = engine_linear(x)[0].split(widths, -1)
    for name, output in zip(linears, parts, strict=True):
        _check_output(f"{name}: the engine", output, expected[name], scheme)


def _check_output(who: str, output: Tensor, expected: Tensor, scheme: Scheme) -> None:
    allowed = ALLOWED.get(scheme.operands.activations, ALLOWED_OTHERWISE)
    difference = output.float() - expected.float()
    error = float(difference.norm() / expected.float().norm())
    if not error <= allowed:  # true for NaN, too
        raise WrongNumbers(
            f"{who} differs from the reference by {error:.1e}; {allowed:.1e} is allowed"
        )


def reference(linear: nn.Linear, scheme: Scheme, x: Tensor) -> Tensor:
    """Return the output [ROWS, N] that `linear` must give for x [ROWS, K] under `scheme`."""
    if not scheme.quantized:
        bias = None if linear.bias is None else linear.bias.float()
        return F.linear(x.float(), linear.weight.float(), bias)
    kernel = reference_kernel(scheme.operands)
    if isinstance(linear, QuantLinear) and linear.frozen:
        low_bit = linear.quantized()
    else:
        low_bit = quantize(linear.weight, scheme)
    return kernel.linear(x, kernel.prepare(low_bit.tensors), linear.bias)


# What a launch runs: the real local trainer and engine, a copy of a model, and random prompts.


def config_of(arguments: Arguments, case: Case, folder: str) -> Config:
    """Return a run's config, with the sizes and counts that `arguments` gives."""
    scheme = case.scheme
    level = case.level or (Level.LINEARS if get_scheme(scheme).quantized else Level.OFF)
    tokens = arguments.sequences * (arguments.prompt_length + arguments.response_length + 32)
    # 1.5 times what all sequences at once need.
    kv_cache = max(0.125, 1.5 * arguments.source.size.kv_bytes_per_token() * tokens / 2**30)
    sequences = max(256, arguments.sequences)
    micro_batches = dict.fromkeys(
        ("ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"),
        arguments.micro_batch_size,
    )
    return run_config(
        folder,
        arguments,
        scheme,
        level,
        data={"max_response_length": arguments.response_length},
        rollout={"max_num_seqs": sequences, "cpu_kvcache_space_gib": kv_cache},
        actor=micro_batches,
        # Random weights differ by more than those of a trained model.
        quant={"mismatch_limit": 5.0},
        optim={"lr": 1e-6},
        lora={"r": case.lora_r},
    )


def random_tokens(vocabulary: int, rows: int, length: int, seed: int = 0) -> list[list[int]]:
    """Return random tokens, the same for every scheme and level."""
    draw = random.Random(seed)

    def row() -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(length)]

    return [row() for _ in range(rows)]


def random_reward(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """Return 0 or 1, depending on the response's text. With random weights any reward is arbitrary."""
    return float(zlib.crc32(solution_str.encode()) & 1)


def make_trainer(arguments: Arguments, case: Case, folder: str, *, engine: bool) -> LocalTrainer:
    """Build the local trainer. Without an engine, the trainer cannot sample."""
    config = config_of(arguments, case, folder)
    tokenizer, hf_config = load_tokenizer(folder)
    rows = random_tokens(hf_config.vocab_size, arguments.prompts, arguments.prompt_length)
    prompts = [Prompt(i, "random", [], ids, "") for i, ids in enumerate(rows)]
    sampler = PromptSampler(len(prompts), len(prompts), seed=0, shuffle=False)
    policy = Policy.load(config)
    dataset = PromptDataset(prompts)
    reward = InProcessReward("random", random_reward)
    parts = RunParts(policy, tokenizer, 0, dataset, [], sampler, reward, {})
    nobody: Any = object()
    return LocalTrainer(config, parts, None if engine else nobody)


def _repeated_prompts(trainer: LocalTrainer) -> list[list[int]]:
    """Return the token ids of each prompt, once for each of its responses."""
    prompts = [prompt.prompt_token_ids for prompt in trainer.parts.train_prompts]
    return [prompt for prompt in prompts for _ in range(trainer.config.rollout.n)]


def random_batch(trainer: LocalTrainer) -> Batch:
    """Return a step's sequences with random responses. `rollout_log_probs` are zero."""
    prompts = _repeated_prompts(trainer)
    length = trainer.config.data.max_response_length
    vocabulary = trainer.policy.model.config.vocab_size
    responses = random_tokens(vocabulary, len(prompts), length, seed=1)
    zeros = [[0.0] * length for _ in prompts]
    finish_reasons = ["length"] * len(prompts)
    rollout = RolloutBatch(prompts, responses, zeros, finish_reasons, trainer.step)
    signs = 1.0 - 2.0 * (torch.arange(len(prompts)) % 2)
    batch = make_batch(rollout, (signs + 1) / 2, signs, pad_token_id=0)
    return batch.to(trainer.policy.device)


@torch.no_grad()
def move_weights(policy: Policy, seed: int) -> None:
    """Add noise of 1/16 of its RMS to every parameter, so that codes and scales change."""
    torch.manual_seed(seed)
    for parameter in policy.model.parameters():
        rms = parameter.float().square().mean().sqrt()
        size = rms.clamp(min=2.0**-6) / 16
        parameter.add_(torch.randn_like(parameter) * size.to(parameter.dtype))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
