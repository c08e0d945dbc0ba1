"""The local backend with the policy itself in vLLM's place: what test_config_reach.py runs and looks at.

Everything else is real: the command line, `prepare_run`, the trainer, its optimizer, publishes, checkpoints, the run
folder. The stand-in samples as vLLM does, from the processed distribution of the live policy, so trainer and engine
agree if the trainer follows the sampling keys, and disagree if it does not.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import yaml
from reach_rows import Notes, merged

from qarl import train
from qarl.checks import machine
from qarl.config import Config, build_config
from qarl.metrics.tracker import read_metrics
from qarl.process import configure_vllm_process
from qarl.quant.meta_model import TORCH_DTYPES
from qarl.rollout.engine import RolloutEngine
from qarl.rollout.publish.wire import PublishReport, expected_manifest
from qarl.trainer import batch as trainer_batch
from qarl.trainer import local, loop, mismatch_watch
from qarl.trainer.setup import RunParts
from qarl.vllm_versions import head


class PolicyAsLLM:
    """In the place of `vllm.LLM`. vLLM's own `EngineArgs` and `SamplingParams` check what it is given."""

    policy: Any = None
    made: list[PolicyAsLLM]
    failures = 0
    """So many calls of `generate` raise."""
    noise = 0.0
    """Added to the log-probs of one half of the responses and taken from those of the other."""

    def __init__(self, **arguments: Any) -> None:
        from transformers import AutoConfig
        from vllm import EngineArgs

        EngineArgs(**arguments)
        self.arguments = arguments
        self.eager_helpers = torch._dynamo.config.disable
        self.requests: list[tuple[str, list[list[int]], list[Any]]] = []
        """For each call: its purpose (`Trainer.doing`), prompts and vLLM's parameters."""
        hf_config = AutoConfig.from_pretrained(arguments["model"])
        core = SimpleNamespace(shutdown=lambda: None)
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config), engine_core=core)
        PolicyAsLLM.made.append(self)

    def reset_prefix_cache(self) -> bool:
        return True

    def get_metrics(self) -> list[Any]:
        return []

    def generate(self, requests: list[Any], params: list[Any], use_tqdm: bool = False) -> list[Any]:
        prompts = [request["prompt_token_ids"] for request in requests]
        self.requests.append((Trainer.doing, prompts, params))
        if PolicyAsLLM.failures:
            PolicyAsLLM.failures -= 1
            raise RuntimeError("made to fail")
        return [SimpleNamespace(outputs=[one]) for one in self._answer(prompts, params)]

    @torch.no_grad()
    def _answer(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        generators = [random.Random(str(one.seed)) for one in params]
        rows: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        longest = max(map(len, prompts))
        for _ in range(max(one.max_tokens for one in params)):
            width = longest + max(map(len, rows))
            ids = torch.tensor([[*p, *r, *[2] * (width - len(p) - len(r))] for p, r in zip(prompts, rows, strict=True)])
            logits = self.policy.model(input_ids=ids, use_cache=False).logits.float()
            for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
                if len(row) >= params[i].max_tokens or row[-1:] == [1]:
                    continue
                kept = processed(logits[i, len(prompt) + len(row) - 1], params[i])
                (token,) = generators[i].choices(range(len(kept)), kept.exp().tolist())
                row.append(token)
                log_probs[i].append(float(kept[token]) + self.noise * (-1) ** i)
        found = [completion(row, values) for row, values in zip(rows, log_probs, strict=True)]
        for prompt, one in zip(prompts, found, strict=True):
            one.routed_experts = self._routing(len(prompt) + len(one.token_ids) - 1)
        return found

    def _routing(self, tokens: int) -> Any:
        """Of a mixture, the first experts in every layer, for all tokens."""
        config = self.llm_engine.model_config.hf_config
        if not self.arguments.get("enable_return_routed_experts"):
            return None
        return numpy.tile(
            numpy.arange(config.num_experts_per_tok, dtype=numpy.uint8), (tokens, config.num_hidden_layers, 1)
        )


def processed(logits: torch.Tensor, params: Any) -> torch.Tensor:
    """Log-probs [V] of what is sampled from: temperature, then vLLM's own top-k and top-p; greedy is one token at 0."""
    if params.temperature == 0:
        return torch.full_like(logits, -torch.inf).scatter(0, logits.argmax(0, keepdim=True), 0.0)
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    k = torch.tensor([params.top_k]) if params.top_k > 0 else None
    p = torch.tensor([params.top_p]) if params.top_p < 1 else None
    kept: torch.Tensor = apply_top_k_top_p_pytorch(logits[None] / params.temperature, k, p)
    return kept[0].log_softmax(0)


def completion(row: list[int], log_probs: list[float]) -> Any:
    entries = [{token: SimpleNamespace(logprob=value, rank=1)} for token, value in zip(row, log_probs, strict=True)]
    reason = "stop" if row[-1:] == [1] else "length"
    return SimpleNamespace(token_ids=row, logprobs=entries, finish_reason=reason)


class Receiver:
    """In the place of the worker's side of a publish: it keeps what comes."""

    version: int | None = None
    coming: int
    kept = None  # every publish is of all tensors
    stale_because, broken, kv_cache_spoilt = "nothing was published", False, False
    seconds: dict[str, float] = {}  # noqa: RUF012  never written to

    @property
    def stale(self) -> bool:
        return self.version is None

    def mark_stale(self, reason: str) -> None:
        self.version, self.stale_because = None, reason

    def feed(self, stream: Any) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in stream if not name.startswith("qarl.")}
        self.version = self.coming


class Engine(RolloutEngine):
    def _prepare_publish(self) -> None:
        dtype = TORCH_DTYPES[self.config.dtype]
        self.expected = expected_manifest(self.hf_config, self.config.scheme, self.config.ignore, dtype=dtype)
        self.receiver: Any = Receiver()

    def publish(self, tensors: Any, *, version: int) -> PublishReport:
        self.receiver.coming = version
        report = super().publish(tensors, version=version)
        self.published: dict[str, torch.Tensor] = self.receiver.tensors
        return report


class Trainer(local.LocalTrainer):
    """Writes down what it does: the forwards of each phase, the batches, and each update."""

    made: list[Trainer]
    doing = ""

    def __init__(self, config: Config, parts: RunParts) -> None:
        self.notes = Notes()
        self.batches: list[Any] = []
        super().__init__(config, parts)
        Trainer.made.append(self)

    def replace_policy(self, policy: Any) -> None:
        super().replace_policy(policy)
        PolicyAsLLM.policy = policy
        policy.model.model.layers[0].register_forward_pre_hook(self.notes.forward, with_kwargs=True)
        step: Any = self.optimizer.step

        def recorded() -> None:
            self.notes.norms.append(float(torch.nn.utils.get_total_norm(list(self.optimizer.gradients.values()))))
            if not self.notes.masters:
                self.notes.masters.append(before)
            step()
            self.notes.masters.append(self._weights())

        before = self._weights()
        optimizer: Any = self.optimizer
        optimizer.step = recorded

    def _weights(self) -> dict[str, torch.Tensor]:
        weights = dict(self.policy.model.named_parameters()) | self.optimizer.state_dict()["masters"]
        return {name: tensor.detach().float().clone() for name, tensor in weights.items()}

    def rollout(self, **more: Any) -> Any:
        Trainer.doing = "rollout"
        batch, metrics = super().rollout(**more)
        self.batches.append(batch)
        return batch, metrics

    def evaluate(self) -> dict[str, float]:
        Trainer.doing = "eval"
        return super().evaluate()

    def old_log_probs(self, *arguments: Any, **more: Any) -> Any:
        self.notes.phase = "old_log_prob" if Trainer.doing == "rollout" else ""
        found = super().old_log_probs(*arguments, **more)
        self.notes.phase = ""
        return found

    def update(self, *arguments: Any, **more: Any) -> Any:
        self.notes.phase = "update"
        found = super().update(*arguments, **more)
        self.notes.phase = ""
        return found


@dataclasses.dataclass
class Run:
    """A run in `folder`, where the process is while it runs; `trainer` is None if none was made."""

    folder: Path
    config: Config
    code: int
    output: str
    trainer: Any
    llms: list[PolicyAsLLM]
    environment: dict[str, str]

    @property
    def notes(self) -> Notes:
        return self.trainer.notes

    @property
    def run_dir(self) -> Path:
        return self.folder / self.config.run_dir

    @functools.cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Values of each step, the step before training too, if it is logged."""
        return read_metrics(self.run_dir)

    def requests(self, doing: str = "rollout") -> tuple[list[list[int]], list[Any]]:
        """Prompts and sampling parameters of the first rollout or evaluation."""
        return next((prompts, params) for what, prompts, params in self.llms[0].requests if what == doing)

    def prompts(self, doing: str = "rollout") -> list[list[int]]:
        return self.requests(doing)[0]

    def files(self, pattern: str) -> list[str]:
        """Names in the run folder."""
        return sorted(path.name for path in self.run_dir.glob(pattern))


@contextmanager
def stubbed(**stub: Any) -> Iterator[None]:
    """The stand-ins in place, with attributes of `PolicyAsLLM`; the process as before afterwards."""
    environment, directory, disabled = dict(os.environ), Path.cwd(), torch._dynamo.config.disable
    with pytest.MonkeyPatch.context() as patch:
        configure_vllm_process()
        patch.setattr("vllm.LLM", PolicyAsLLM)
        patch.setattr(machine, "vllm_without_device", lambda: None)  # the stand-in needs none
        patch.setattr(head, "installed_version", lambda: "0.29.0")
        patch.setattr(trainer_batch, "FEWEST_TOKENS", 0)  # it would add a row to a small pack
        patch.setattr(mismatch_watch, "NOISE_LIMITS", {})  # the stand-in rounds as the policy does, not as vLLM
        patch.setattr(local, "RolloutEngine", Engine)
        patch.setattr(loop, "LocalTrainer", Trainer)
        PolicyAsLLM.made, Trainer.made, Trainer.doing = [], [], ""
        for name, value in ({"failures": 0, "noise": 0.0} | stub).items():
            patch.setattr(PolicyAsLLM, name, value)
        try:
            yield
        finally:
            torch._dynamo.config.disable = disabled
            os.chdir(directory)
            os.environ.clear()
            os.environ.update(environment)


def run(folder: Path, files: Path, changes: dict[str, Any], stub: dict[str, Any], capsys: Any) -> Run:
    """`python -m qarl.train` with `changes`, in `folder`, which is made to show `files`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    values = merged(**changes)
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    capsys.readouterr()
    with stubbed(**stub), torch._dynamo.config.patch(disable=False):
        os.chdir(folder)
        code = train.main(["config=config.yaml"])
        environment, llms = dict(os.environ), PolicyAsLLM.made
        trainer = Trainer.made[-1] if Trainer.made else None
    captured = capsys.readouterr()
    return Run(folder, build_config(values), code, captured.out + captured.err, trainer, llms, environment)
