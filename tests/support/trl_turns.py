"""Scripted conversations for TRL: a tokenizer with tools, an engine that says what a script says, and TRL beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import trl
from datasets import Dataset
from random_models import save_random_model
from trl import GRPOConfig, GRPOTrainer
from trl_steps import Engine

from qarl.demo.tiny_model import make_tokenizer
from qarl.rollout.requests import RolloutBatch
from qarl.trl import QaRLConfig, QaRLTrainer, trainer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
Script = Mapping[str, Sequence[str]]
"""Question -> the model's turns. A turn that ends with CUT has no end of turn."""
CUT = "~"
OPENING = "<|im_start|>assistant\n"


def chat_tokenizer(template: str = "qwen3") -> Any:
    """A token for each byte, and a chat template of TRL's that has tools."""
    tokenizer = make_tokenizer(positions=8192)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


def save_chat_model(folder: Path, template: str = "qwen3") -> Path:
    """A random model with `chat_tokenizer`."""
    tokenizer = chat_tokenizer(template)
    end = tokenizer.eos_token_id
    size = len(tokenizer)
    save_random_model(
        folder, vocab_size=size, max_position_embeddings=4096, eos_token_id=end, pad_token_id=0
    )
    tokenizer.save_pretrained(folder)
    return folder


def scripted_turn(tokenizer: Any, script: Script, prompt: Sequence[int], limit: int) -> list[int]:
    """Return the ids of the turn of `script` behind a prompt, at most `limit`."""
    text = tokenizer.decode(prompt)
    (question,) = (key for key in script if f"user\n{key}<" in text)
    turn = script[question][text.count(OPENING) - 1]
    ids = list(tokenizer(turn.removesuffix(CUT), add_special_tokens=False)["input_ids"])
    return (ids if turn.endswith(CUT) else [*ids, tokenizer.eos_token_id])[:limit]


class ScriptedEngine(Engine):
    """Says what `script` says, with a log-prob of -1 for each token."""

    script: ClassVar[Script] = {}
    tokenizer: Any = None
    llm: Any = SimpleNamespace(llm_engine=SimpleNamespace(abort_request=lambda *_, **__: None))

    def generate(
        self,
        prompts: Any,
        sampling: Any,
        seeds: Any = None,
        *,
        max_tokens: Any = None,
        run: Any = None,
    ) -> Any:
        limits = max_tokens or [sampling.max_tokens] * len(prompts)
        turns = [
            scripted_turn(self.tokenizer, self.script, prompt, limit)
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        end = self.tokenizer.eos_token_id
        return RolloutBatch(
            [list(prompt) for prompt in prompts],
            turns,
            [[-1.0] * len(turn) for turn in turns],
            ["stop" if turn and turn[-1] == end else "length" for turn in turns],
            0,
        )


class ScriptedTRL(GRPOTrainer):
    """TRL's own trainer and loop of tools, with a script for its engine."""

    script: ClassVar[Script] = {}

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        limit = self.max_completion_length
        assert limit is not None
        turns = [
            scripted_turn(self.processing_class, self.script, ids, limit) for ids in prompt_ids
        ]
        return turns, [[-1.0] * len(turn) for turn in turns]


def settings(folder: Path, script: Script) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "max_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 2 * len(script),
        "num_generations": 2,
        "max_completion_length": 400,
    }


def rows_of(script: Script) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": question}]} for question in script]


def ours(model: Path, folder: Path, monkeypatch: Any, script: Script, **arguments: Any) -> Any:
    """A QaRLTrainer whose engine says what `script` says. `arguments`: of the trainer, or of its config."""
    monkeypatch.setattr(trainer, "RolloutEngine", ScriptedEngine)
    monkeypatch.setattr(ScriptedEngine, "script", script)
    of_config = {
        name: arguments.pop(name)
        for name in [*arguments]
        if name in QaRLConfig.__dataclass_fields__
    }
    args = QaRLConfig(**settings(folder, script) | {"quant_group_size": 32} | of_config)
    data = Dataset.from_list(rows_of(script))
    built = QaRLTrainer(str(model), args=args, **{"train_dataset": data} | arguments)
    monkeypatch.setattr(ScriptedEngine, "tokenizer", built.processing_class)
    return built


def trls(model: Path, folder: Path, script: Script, **arguments: Any) -> Any:
    """TRL's own trainer with the same script."""
    of_config = {
        name: arguments.pop(name)
        for name in [*arguments]
        if name in GRPOConfig.__dataclass_fields__
    }
    args = GRPOConfig(**settings(folder, script) | of_config)
    data = Dataset.from_list(rows_of(script))
    built = ScriptedTRL(str(model), args=args, **{"train_dataset": data} | arguments)
    ScriptedTRL.script = script
    return built


def batch_of(built: Any, script: Script) -> dict[str, Any]:
    """Return the batch that a trainer makes of two conversations of each question."""
    built.model.train()
    rows = [dict(row) for row in rows_of(script) for _ in range(2)]
    output: dict[str, Any] = built._generate_and_score_completions(rows)
    return output
