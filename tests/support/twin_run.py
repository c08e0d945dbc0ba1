"""A real local trainer whose steps are recorded, with an engine that samples from the tensors it was sent.

The engine is the twin's float64 model (`twin_model`). So a wrong tensor on the wire changes its log-probs, and with
them every mismatch. What it samples depends only on the seeds of its requests. Its log-probs have noise, so that the
mismatch and its corrections are at work. Some responses are empty, cut off, repeated or unlikely.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from checkout import ROOT
from engine_helpers import config
from torch import Tensor
from twin_model import TwinModel, dequantized
from twin_reward import score

from qarl.checkpoint.resumable import open_checkpoint
from qarl.config import Config
from qarl.data.reward_workers import InProcessReward
from qarl.rollout.publish.manifest import PublishReport, expected_manifest
from qarl.rollout.requests import RolloutBatch
from qarl.schemes import get_scheme
from qarl.trainer.checkpoints import Checkpoints, restore
from qarl.trainer.local import LocalTrainer
from qarl.trainer.prepare import prepare_run

EOS = 1
LIMIT = 16
LENGTHS = (5, 16, 0, 3, 16, 7, 1, 9, 16, 2, 6, 4)
"""Tokens of the responses to the requests of a step."""
CUT_OFF = (1, 8)
"""Responses that the limit ends. The other one of its length ends with EOS."""
REPEATED = 1
UNLIKELY = 8
NOISE = 0.15
"""Standard deviation of the noise of the engine's log-probs, in nats."""

KEYS = (
    "data.train_batch_size=4",
    "rollout.n=3",
    "data.max_prompt_length=8",
    f"data.max_response_length={LIMIT}",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=2",
    "actor.log_prob_micro_batch_size_per_gpu=4",
    "actor.old_log_probs=recompute",
    "quant.align=linears",
    "quant.mismatch_limit=5.0",
    "reward.check_ground_truths=false",
    "trainer.val_before_train=false",
    "trainer.total_training_steps=6",
    "trainer.report=false",
    "seed=5",
)
BANDS = (
    "actor.seq_clip_ratio_high=0.02",
    "actor.neg_seq_clip_ratio_low=0.01",
    "actor.neg_seq_clip_ratio_high=0.03",
)


def write_prompts(folder: Path) -> Path:
    """Nine prompts of one to six tokens from three sources."""
    rows = []
    for index in range(9):
        words = " ".join(f"t{5 + (7 * index + 3 * word) % 50}" for word in range(1 + index % 6))
        rows.append(
            {
                "data_source": ("plain", "equal", "signed")[index % 3],
                "prompt": [{"role": "user", "content": words}],
                "reward_model": {"ground_truth": f"t{10 + index}"},
                "extra_info": {"weight": index},
            }
        )
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@dataclass
class Forward:
    """A micro-batch: its rows, its log-probs [rows, R] and d loss / d log-prob, [rows, R]."""

    rows: list[int]
    log_probs: Tensor
    gradient: Tensor | None = None
    loss: float = 0.0


@dataclass
class Update:
    """An optimizer step: `gradients` before clipping, and the weights before and after it."""

    forwards: list[Forward]
    gradients: dict[str, Tensor]
    scale: float
    before: dict[str, Tensor]
    after: dict[str, Tensor] = field(default_factory=dict)
    norm: float = 0.0
    training_step: int = 0


class Step(SimpleNamespace):
    """Everything of one training step that crosses a border between two parts:

    number                   of the step, from 0
    prompts, sampling, seeds what the engine was asked
    rollout, clean           its answer, and its log-probs without the noise
    batch, old, measured     what is trained on, the old log-probs, and the trainer's own
    weights_before, updates  the weights at the start, and the `Update` of each optimizer step
    sent_before              what the engine held while it sampled
    sent, adapter, version   what it holds after the step
    metrics, seconds         what the step logs

    The twin adds what it computes."""


class TwinEngine:
    """Samples from what it was sent, by `twin_model`."""

    routing, rebuilds, has_weights = False, 0, False
    weight_version = -1

    def __init__(self, settings: Config, folder: Path) -> None:
        self.settings = settings
        self.model = TwinModel(folder)
        self.sent: dict[str, Tensor] = {}
        self.adapter: Any = None
        self.asked: list[tuple[Any, Any, Any]] = []
        self.clean: list[list[float]] = []
        self.weights = SimpleNamespace(storage=dict)

    def sleep(self) -> None: ...

    def publish_from(self, source: Any, *, version: int) -> PublishReport:
        report: PublishReport = source(self, version=version)
        return report

    def publish(self, tensors: Any, *, version: int, prepared: Any = None) -> PublishReport:
        named = list(tensors)
        self.sent = {name: tensor.detach().clone() for name, tensor in named}
        self.has_weights, self.weight_version = True, version
        quant = self.settings.quant
        scheme = get_scheme(quant.scheme, group_size=quant.group_size)
        expected = expected_manifest(self.model.model.config, scheme, quant.ignore)
        return PublishReport.of(named, expected, version, {"validate": 0.0, "apply": 0.0})

    def publish_adapter(self, adapter: Any, *, version: int) -> PublishReport:
        self.adapter = {
            "r": adapter.r,
            "alpha": adapter.alpha,
            "tensors": {name: tensor.detach().clone() for name, tensor in adapter.tensors.items()},
        }
        self.weight_version = version
        nbytes = sum(tensor.nbytes for tensor in adapter.tensors.values())
        return PublishReport(version, len(adapter.tensors), nbytes, 0, 0, {})

    @torch.no_grad()
    def generate(self, prompts: Any, sampling: Any, seeds: Any) -> RolloutBatch:
        self.asked.append((prompts, sampling, seeds))
        load(self.model, self.settings, self.sent, self.adapter)
        responses, clean, logged = [], [], []
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            random = torch.Generator().manual_seed(seed % 2**62)
            tokens = self._sampled(prompt, sampling, index, random)
            exact = self.model.log_probs(prompt, tokens, sampling.temperature)
            noise = NOISE * torch.randn(len(tokens), generator=random, dtype=torch.float64)
            responses.append(tokens)
            clean.append(exact.tolist())
            logged.append((exact + noise).clamp(max=-1e-4).tolist())
        self.clean = clean
        reasons = ["length" if index in CUT_OFF else "stop" for index in range(len(prompts))]
        self.answer = RolloutBatch(
            [list(prompt) for prompt in prompts],
            responses,
            logged,
            reasons,
            weight_version=self.weight_version,
        )
        return self.answer

    def _sampled(
        self, prompt: Sequence[int], sampling: Any, index: int, random: torch.Generator
    ) -> list[int]:
        length = LENGTHS[index % len(LENGTHS)]
        tokens: list[int] = []
        for place in range(length):
            if place == length - 1 and index not in CUT_OFF:
                tokens.append(EOS)
                continue
            if index == REPEATED and place >= 2:
                tokens.append(tokens[place - 2])
                continue
            logits = self.model.logits([*prompt, *tokens])[-1] / sampling.temperature
            logits[: EOS + 2] = -torch.inf
            probabilities = logits.softmax(-1)
            if index == UNLIKELY:
                probabilities = (probabilities.argsort() == 3).double()
            tokens.append(int(torch.multinomial(probabilities, 1, generator=random)))
        return tokens


def quantized_layers(sent: dict[str, Tensor]) -> list[str]:
    return [name.rpartition(".")[0] for name in sent if name.endswith("weight_scale")]


def load(model: TwinModel, settings: Config, sent: dict[str, Tensor], adapter: Any) -> None:
    """Set the weights to those of a publish, with the adapter merged into them."""
    quant = settings.quant
    weights = dequantized(sent, quant.scheme, quant.group_size)
    model.load(weights, quant.scheme, quantized_layers(sent))
    model.adapt(adapter)


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


class Recorder:
    """Watches the borders of a trainer's parts."""

    def __init__(self, trainer: Any, engine: TwinEngine) -> None:
        self.trainer, self.engine = trainer, engine
        self.first_sent: dict[str, Tensor] = {}
        self.steps: list[Step] = []
        self._forwards: list[Forward] = []
        wrapped(trainer, "rollout", self._rollout)
        wrapped(trainer, "update", self._update)
        wrapped(trainer, "optimizer_step", self._optimizer_step)
        wrapped(trainer, "loss", self._loss)
        wrapped(trainer.optimizer, "clip_and_step", self._clip_and_step)

    @property
    def step(self) -> Step:
        return self.steps[-1]

    def train_step(self) -> Step:
        engine, trainer = self.engine, self.trainer
        self.steps.append(Step(number=trainer.step, sent_before=engine.sent, updates=[]))
        self.step.weights_before = self._weights()
        self.step.metrics = trainer.train_step()
        self.step.seconds = trainer.timer.pop()
        self.step.sent, self.step.version = engine.sent, engine.weight_version
        self.step.adapter = engine.adapter
        self.step.measured = trainer.source.measured
        return self.step

    def _rollout(self, original: Any) -> Any:
        batch, metrics = original()
        step, engine = self.step, self.engine
        step.prompts, step.sampling, step.seeds = engine.asked[-1]
        step.clean, step.rollout, step.batch = engine.clean, engine.answer, batch
        return batch, metrics

    def _update(self, original: Any, batch: Any, old: Tensor, confirm: Any = None) -> Any:
        self.step.old = old.clone()
        return original(batch, old, confirm)

    def _loss(self, original: Any, batch: Any, old: Any, rows: Any, new: Tensor, whole: Any) -> Any:
        numbers = [*batch.numbers(rows)]
        forward = Forward(numbers, new.detach().clone(), torch.zeros_like(new))
        new.register_hook(lambda gradient: setattr(forward, "gradient", gradient.clone()))
        loss, statistics = original(batch, old, rows, new, whole)
        forward.loss = loss.item()
        self._forwards.append(forward)
        return loss, statistics

    def _weights(self) -> dict[str, Tensor]:
        optimizer = self.trainer.optimizer
        masters = optimizer.state_dict()["masters"]
        named = self.trainer.policy.model.named_parameters()
        return {name: masters.get(name, p).detach().clone() for name, p in named if p.requires_grad}

    def _clip_and_step(self, original: Any, max_norm: float) -> float:
        optimizer = self.trainer.optimizer
        gradients = {name: g.clone() for name, g in optimizer.gradients.items()}
        self.step.updates.append(
            Update(
                self._forwards,
                gradients,
                optimizer.loss_scale.scale,
                self._weights(),
                training_step=optimizer.training_step,
            )
        )
        self._forwards = []
        return original(max_norm)

    def _optimizer_step(self, original: Any) -> float:
        norm = original()
        update = self.step.updates[-1]
        update.norm, update.after = norm, self._weights()
        return norm


def recorded_trainer(
    settings: Config, prepare: Callable[[Any], object] = lambda trainer: None
) -> Recorder:
    """A trainer before its next step, which has published its weights. `prepare`: called before that."""
    parts = prepare_run(settings)
    parts.reward_fn = InProcessReward("score", score)
    engine: Any = TwinEngine(settings, Path(settings.model.path))
    trainer = LocalTrainer(settings, parts, engine)
    prepare(trainer)
    recorder = Recorder(trainer, engine)
    trainer.publish()
    recorder.first_sent = engine.sent
    trainer.timer.pop()
    return recorder


def settings_for(folder: Path, model: Path, *keys: str) -> Config:
    prompts = write_prompts(folder)
    files = (f"model.path={model}", f"data.train_files=[{prompts}]", f"data.val_files=[{prompts}]")
    file = ROOT / "tests/support/twin_reward.py"
    reward = f"reward.function={file}:score"
    given = dict(key.split("=", 1) for key in (*files, *KEYS, reward, *keys))
    if "actor.use_dynamic_bsz" in given:
        given = {name: value for name, value in given.items() if "micro_batch" not in name}
    if given.get("actor.loss", "tbpo") == "tbpo":
        given |= dict(key.split("=") for key in BANDS)
    return config(folder, *(f"{key}={value}" for key, value in given.items()))


def resumed(recorder: Recorder) -> Recorder:
    """A new trainer, restored from a checkpoint of `recorder`'s."""
    trainer = recorder.trainer
    checkpoints = Checkpoints(trainer)
    log: Any = SimpleNamespace(message=lambda text: None)
    written = checkpoints.save(recorder.step.metrics, log)
    assert not written["checkpoint/failed"]
    folder = checkpoints.folder / f"step_{trainer.step}"
    return recorded_trainer(trainer.config, lambda other: restore(other, open_checkpoint(folder)))
