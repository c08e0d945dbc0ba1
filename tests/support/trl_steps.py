"""A `QaRLTrainer` with a stub for the engine, for tests of its steps."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset

from qarl.align.levels import engine_arithmetic
from qarl.quant.convert import published_forward
from qarl.rollout.publish.manifest import PublishReport
from qarl.trl import QaRLConfig, QaRLTrainer, trainer
from qarl.trl.log_probs import as_batch, log_probs_of_rows

TOKENS = 6
DATA = Dataset.from_dict({"prompt": ["t3 t4", "t5 t6 t7"] * 4})


class Engine:
    """Random responses with the log-probs of the engine's arithmetic. `wrong`: a factor of the attention's scale."""

    stale = False
    policy: Any = None
    wrong = 1.0

    def __init__(self, _: Any) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def publish_from(self, source: Any, *, version: int) -> Any:
        return source(self, version=version)

    def publish(self, tensors: Any, *, version: int, prepared: Any) -> Any:
        return PublishReport.of(list(tensors), {}, version, {})

    def sleep(self) -> None:
        pass

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], sampling: Any, seeds: list[int]) -> Any:
        responses = torch.randint(3, 60, (len(prompts), TOKENS), generator=self.generator).tolist()
        log_probs, policy = [], self.policy
        with ExitStack() as stack:
            if policy.align != "exact":
                stack.enter_context(engine_arithmetic(policy.model))
                stack.enter_context(published_forward(policy.model, policy.scheme, policy.ignore))
            attentions = [layer.self_attn for layer in policy.model.model.layers]
            for attention in attentions:
                attention.scaling *= self.wrong
            for prompt, response in zip(prompts, responses, strict=True):
                ids = torch.tensor([prompt + response])
                batch = as_batch(ids, torch.ones_like(ids), TOKENS)
                values, _ = log_probs_of_rows(
                    policy, batch, slice(0, 1), temperature=1.0, entropies=False
                )
                log_probs.append(values[0].tolist())
            for attention in attentions:
                attention.scaling /= self.wrong
        return SimpleNamespace(
            prompt_token_ids=prompts, response_token_ids=responses, rollout_log_probs=log_probs
        )


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def nothing(completions: list[str], **_: Any) -> list[None]:
    return [None] * len(completions)


def build(
    model: Path,
    folder: Path,
    monkeypatch: Any,
    rewards: Any = length,
    wrong: float = 1.0,
    data: Dataset = DATA,
    **settings: Any,
) -> QaRLTrainer:
    monkeypatch.setattr(trainer, "RolloutEngine", Engine)
    base = {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": True,
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": TOKENS,
        "quant_group_size": 32,
        "gradient_checkpointing": False,
        "save_strategy": "no",
    }
    trainer_ = QaRLTrainer(str(model), rewards, QaRLConfig(**base | settings), data)
    trainer_.engine.policy, trainer_.engine.wrong = trainer_.policy, wrong
    return trainer_
