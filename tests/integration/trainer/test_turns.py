"""Training on conversations with a real engine: δ = 0 on every token of the model, in every scheme and turn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import config
from glossary import glossary_metrics
from metrics_table import misplaced

from qarl.errors import UserError
from qarl.metrics.mismatch_limit import MismatchError
from qarl.report.samples import read_samples
from qarl.trainer.local import LocalTrainer
from qarl.trainer.loop import train, train_in_run_folder
from qarl.trainer.prepare import prepare_run
from qarl.turns.conversation import Conversation, Span

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]
ENVIRONMENTS = "tests/support/turn_environments.py"
KEYS = (
    f"rollout.environment={ENVIRONMENTS}:three_sums", "reward.function=environment", "data.max_response_length=200",
    "data.train_batch_size=6", "trainer.val_max_prompts=8", "actor.ppo_mini_batch_size=3",
    "actor.ppo_micro_batch_size_per_gpu=24", "trainer.plots=false",
)  # fmt: skip


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "bf16"])
def test_training_on_three_turns_has_no_mismatch(tmp_path: Path, scheme: str) -> None:
    """The log-probs of later turns come from prompts that hold what the engine decoded before."""
    settings = config(tmp_path, *KEYS, f"quant.scheme={scheme}", "actor.old_log_probs=recompute")
    trainer = LocalTrainer(settings, prepare_run(settings))
    with trainer.engine:
        trainer.publish()
        for _ in range(2):
            metrics = trainer.train_step()
            assert metrics["mismatch/abs_max"] == 0.0
            assert metrics["turns/mean"] > 2.5
            assert metrics["actor/grad_norm"] > 0
        seconds = trainer.timer.pop()
        accuracy = trainer.evaluate()["val/accuracy"]
    assert 0 < accuracy <= 3
    logged = {*metrics, *seconds}
    assert "timing_s/environment" in logged
    assert logged - glossary_metrics() == set()
    assert misplaced(logged, "local") == []


def test_a_batch_of_conversations(tmp_path: Path) -> None:
    """The mask is true at sampled tokens, whose log-probs are the engine's, and nowhere else."""
    settings = config(tmp_path, *KEYS)
    trainer = LocalTrainer(settings, prepare_run(settings))
    with trainer.engine:
        trainer.publish()
        batch, metrics = trainer.rollout(top_tokens=True)
    assert batch.conversations is not None and batch.rollout_top_tokens is not None
    sampled = 0
    for row, conversation in enumerate(batch.conversations):
        length = len(conversation.response_token_ids)
        assert int(batch.response_lengths[row]) == length
        mask = batch.response_mask[row, :length].tolist()
        assert mask == conversation.mask and not batch.response_mask[row, length:].any()
        assert bool((batch.rollout_log_probs[row, :length][~torch.tensor(mask)] == 0).all())
        assert bool((batch.rollout_log_probs[row, :length][torch.tensor(mask)] < 0).any())
        text = trainer.tokenizer.decode(conversation.response_token_ids)
        assert text.count("<|assistant|>") == len(conversation.turns) - 1
        sampled += sum(mask)
    assert metrics["response_length/mean"] == sampled / len(batch)


def test_contexts_in_the_mask_by_mistake_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context was not sampled, so its log-prob in the rollout is 0, and the trainer's is not."""
    add_context = Conversation.add_context

    def as_a_turn(conversation: Conversation, *arguments: Any) -> None:
        add_context(conversation, *arguments)
        end = len(conversation.response_token_ids)
        conversation.turns[-1] = Span(conversation.turns[-1].start, end)

    monkeypatch.setattr(Conversation, "add_context", as_a_turn)
    settings = config(tmp_path, *KEYS)
    trainer = LocalTrainer(settings, prepare_run(settings))
    with trainer.engine:
        trainer.publish()
        with pytest.raises(MismatchError):
            trainer.train_step()


def test_a_whole_run_resumed_and_its_files(tmp_path: Path) -> None:
    """Two steps, and one step and its continuation, train the same. The samples show turns, the export is there."""
    keys = (*KEYS, "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=1")
    whole = config(tmp_path, *keys, "name=whole", "optim.lr_scheduler_type=constant")
    train(whole)
    parts = config(tmp_path, *keys, "name=parts", "optim.lr_scheduler_type=constant")
    one = parts.model_copy(
        update={"trainer": parts.trainer.model_copy(update={"total_training_steps": 1})}
    )
    train(one)
    train_in_run_folder(
        parts.model_copy(
            update={
                "trainer": parts.trainer.model_copy(
                    update={
                        "resume_mode": "resume_path",
                        "resume_from_path": str(one.run_dir / "checkpoints" / "step_1"),
                    }
                ),
                "name": "resumed",
            }
        ),
        started=0.0,
    )
    last = [read_metrics(tmp_path / name)[-1] for name in ("whole", "resumed")]
    for key in (
        "turns/mean",
        "critic/score/mean",
        "actor/grad_norm",
        "rollout/entropy",
        "val/accuracy",
    ):
        assert last[0][key] == last[1][key], key
    assert (tmp_path / "whole/export/model.safetensors").is_file()
    samples = read_samples(whole.run_dir)
    assert all(sample["turns"] >= 2 for sample in samples)
    assert all(
        0 in sample["of_model"] and len(sample["of_model"]) == len(sample["tokens"])
        for sample in samples
    )
    assert "of_model" in (whole.run_dir / "report.html").read_text(encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "qarl.eval",
        str(tmp_path / "resumed"),
        "limit=8",
        "temperature=0",
    ]
    score = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert "| column_addition | 8 | 1 |" in score


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([f"rollout.environment={ENVIRONMENTS}:nothing"], "its functions: .*three_sums"),
        (["rollout.environment=no/file.py:answer"], "cannot load no/file.py"),
        (["reward.function=arithmetic"], "arithmetic does not read them"),
    ],
    ids=["no function", "no file", "a reward that is not read"],
)
def test_refusals(tmp_path: Path, keys: list[str], words: str) -> None:
    given = {key.partition("=")[0] for key in keys}
    others = [key for key in KEYS if key.partition("=")[0] not in given]
    settings = config(tmp_path, *others, *keys)
    with pytest.raises(UserError, match=f"(?s){words}"):
        trainer = LocalTrainer(settings, prepare_run(settings))
        with trainer.engine:
            trainer.publish()
            trainer.train_step()
