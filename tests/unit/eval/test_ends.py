"""Where the responses of `qarl eval` end: where those of the run's own evaluations do, or as its arguments say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from qarl.config import load_config, write_resolved
from qarl.data.prompts import Prompt
from qarl.eval import evaluate
from qarl.eval.arguments import EvalRequest, settings_of
from qarl.rollout.engine_config import SamplingConfig
from qarl.rollout.requests import RolloutBatch
from qarl.turns.loop import Limits

ENDS = ("rollout.stop=['+']", "rollout.stop_token_ids=[3,5]", "rollout.min_tokens=2")


class Engine:
    """Stands where the engine is, and keeps how it was asked to sample."""

    def __init__(self) -> None:
        self.asked: list[SamplingConfig] = []

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        """There is nothing to close."""

    def publish(self, tensors: Any, *, version: int) -> None:
        """There are no weights."""

    def generate(self, prompts: Any, sampling: SamplingConfig, seeds: list[int]) -> RolloutBatch:
        self.asked.append(sampling)
        return RolloutBatch(prompts, [[7]], [[-1.0]], ["stop"], 0)


class Conversations:
    """Holds none."""

    environment = SimpleNamespace(stop=lambda: None)

    def hold(self, engine: Engine, rows: Any, *how: Any) -> RolloutBatch:
        return engine.generate([row.prompt_token_ids for row in rows], *how)


@pytest.mark.parametrize("held", [None, Conversations()], ids=["one turn", "several turns"])
@pytest.mark.parametrize("keys", [(), *([key] for key in ENDS), ENDS], ids=str)
def test_the_ends_are_those_of_the_runs_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], held: Any
) -> None:
    config = load_config(["config=quickstart.yaml", f"output_dir={tmp_path}", *keys])
    write_resolved(config, config.run_dir / "config.yaml")
    request = EvalRequest(config.run_dir, files="sums.jsonl")
    engine = Engine()
    tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: ["3"] * len(ids))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    monkeypatch.setattr(evaluate, "conversations_in", lambda *_: held)
    monkeypatch.setattr(evaluate, "engine_of", lambda *_: None)
    monkeypatch.setattr(evaluate, "RolloutEngine", lambda _: engine)
    monkeypatch.setattr(evaluate, "read_tensors", lambda _: ())
    prompts = [Prompt(0, "sums", [], [1], "3")]
    figures = evaluate.score_model(tmp_path, prompts, request, settings_of(request))
    assert figures["mean"] == {"sums": {0: 1.0}}
    assert engine.asked == [SamplingConfig.of_evaluation(config)]


def test_arguments_win_over_the_run(tmp_path: Path) -> None:
    config = load_config(["config=quickstart.yaml", f"output_dir={tmp_path}", *ENDS])
    write_resolved(config, config.run_dir / "config.yaml")
    request = EvalRequest(config.run_dir, files="sums.jsonl", stop=["="], min_tokens=0)
    settings = settings_of(request)
    ends = evaluate.ends_of(settings.rollout)
    assert ends == {"stop": ("=",), "stop_token_ids": (3, 5), "min_tokens": 0}


def test_conversations_have_the_limit_of_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["rollout.environment=own.py:answer", "reward.function=environment"]
    config = load_config(["config=quickstart.yaml", f"output_dir={tmp_path}", *keys])
    write_resolved(config, config.run_dir / "config.yaml")
    request = EvalRequest(config.run_dir, files="sums.jsonl", max_response_length=9)
    limits = Limits(turns=3, response=config.data.max_response_length, turn=5)
    built = SimpleNamespace(limits=limits)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: None)
    monkeypatch.setattr(evaluate, "stop_token_ids", lambda *_: [])
    monkeypatch.setattr(evaluate, "conversations_of", lambda *_: built)
    assert evaluate.conversations_in(tmp_path, None, request, settings_of(request)) is built
    assert built.limits == Limits(turns=3, response=9, turn=5)
