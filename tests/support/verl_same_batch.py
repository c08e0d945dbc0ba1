"""One training step on the same recorded batch in both backends, on one gloo rank, without Ray and an engine.

    verl_same_batch.py FOLDER OUTPUT [turns | unmasked]

saves the metrics of each backend under the names of metrics.jsonl. The responses are random tokens, one of them cut off
at the limit, one of the limit's length that ends with EOS. The rollout's log-probs are a policy's own with noise.

With `turns`, each response is a conversation of two turns, whose context has log-probs of 0 in the rollout. With
`unmasked`, verl's batch says by mistake that the model sampled the contexts, and the error of the step is saved.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from verl_old_log_probs import (
    KeyedStore,
    changed,
    first_batch,
    make_files,
    make_trainer,
    make_worker,
    nested,
)

from qarl.checkpoint.storage import number
from qarl.config import Config
from qarl.data.reward_outcomes import Scored
from qarl.errors import UserError
from qarl.rollout.publish.manifest import PublishReport
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.prepare import prepare_run
from qarl.turns.conversation import Conversation, spans_of
from qarl.verl.followed_log import our_names
from qarl.verl.run import verl_config

KEYS = {
    "quant.mismatch_limit": 5.0,
    "quant.scheme": "w8a8",
    "data.max_response_length": 11,
    "optim.lr": 1e-3,
    "actor.old_log_probs": "recompute",
    "actor.seq_clip_ratio_high": 0.05,
    "actor.neg_seq_clip_ratio_low": 0.05,
    "actor.neg_seq_clip_ratio_high": 0.05,
}
LIMIT = {"quant.mismatch_limit": 1.0}
"""Between the mean |δ| of the recorded log-probs, and that with contexts."""
EOS = 1
NOT_SENT = {"uid", "rm_scores", "log_probs", "entropy", "num_turns", "extra_fields"}
"""Columns that the workers do not get here."""
CONTEXT = slice(1, 3)
"""The context's place in each conversation."""


def recorded(config: Config, kind: str) -> tuple[Any, dict[str, Any]]:
    """verl's keys of the batch, and its columns. Row 7 is cut off at the limit, and row 6 ends there with EOS."""
    batch, columns = first_batch(config)
    random = torch.Generator().manual_seed(1)
    prompts, responses = (
        [row.clone() for row in columns[name].unbind()] for name in ("prompts", "responses")
    )
    responses[6] = torch.cat([responses[6], torch.tensor([EOS])])
    assert [len(row) for row in responses] == [4, 5, 6, 7, 8, 9, 11, 11]
    rewards = [row.sum()[None] for row in columns["rm_scores"].unbind()]
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [torch.ones_like(row) for row in responses]
    logged = [-4.2 + 0.5 * torch.randn(len(row), generator=random) for row in responses]
    told: list[dict[str, Any]] = [{} for _ in responses]
    if kind:
        for row in (*masks, *logged):
            row[CONTEXT] = 0
        told = [
            {"finish_reason": reason, "failures": 1} for reason in finish_reasons(config, responses)
        ]
    shown = [torch.ones_like(row) for row in responses] if kind == "unmasked" else masks
    columns = {"uid": columns["uid"], "num_turns": [2] * len(responses), "extra_fields": told} | {
        name: nested(rows)
        for name, rows in {
            "input_ids": whole,
            "prompts": prompts,
            "responses": responses,
            "position_ids": [torch.arange(len(row)) for row in whole],
            "response_mask": shown,
            "loss_mask": shown,
            "rollout_log_probs": logged,
            "rm_scores": [
                torch.cat([torch.zeros(len(row) - 1), reward])
                for row, reward in zip(responses, rewards, strict=True)
            ],
        }.items()
    }
    for tag, prompt, response in zip(batch.tags, prompts, responses, strict=True):
        tag |= {
            "min_global_steps": 0,
            "max_global_steps": 0,
            "seq_len": len(prompt) + len(response),
        }
    return batch, columns


def finish_reasons(config: Config, responses: list[Any]) -> list[str]:
    limit = config.data.max_response_length
    return ["length" if len(row) == limit and row[-1] != EOS else "stop" for row in responses]


def in_verl(config: Config, kind: str) -> dict[str, dict[str, Any]]:
    """The metrics of the step, and of one whose gradients are NaN."""
    resolved = verl_config(config, on_cpu=True)
    OmegaConf.resolve(resolved)
    trainer, worker = make_trainer(resolved), make_worker(resolved)
    batch, columns = recorded(config, kind)
    store = KeyedStore(batch.keys, columns)
    store.batch = batch

    def run(function: Any, batch: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        names = store.fields(batch.keys) - NOT_SENT
        data = store.kv_batch_get(keys=batch.keys, partition_id=None, select_fields=sorted(names))
        tu.assign_non_tensor(data, **batch.extra_info)
        return function(data)

    def compute_log_prob(batch: Any) -> Any:
        output = run(worker.compute_log_prob, batch)
        store.kv_batch_put(
            keys=batch.keys, partition_id=None, fields=output.select("log_probs", "entropy")
        )
        return batch.keys

    trainer.actor_rollout_wg = SimpleNamespace(
        compute_log_prob=compute_log_prob,
        update_actor=lambda batch: run(worker.update_actor, batch),
    )
    trainer._rollout_moe_lb_metrics_accumulator = None
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    metrics: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.trainer.ppo.v1.trainer_base.tq", store)
        patch.setattr("qarl.verl.trainer.tq", store)
        batch.extra_info = {"temperature": 1.0}
        trainer._compute_old_log_prob(batch, metrics)
        trainer._compute_advantage(batch, metrics)
        trainer._update_actor(batch, metrics)
        trainer._compute_metrics(batch, metrics, {"step": 1.0, "gen": 0.5}, 1, 0)
        skipped: dict[str, Any] = {}
        patch.setattr(worker.actor.engine, "optimizer_step", lambda: math.nan)
        trainer._update_actor(batch, skipped)
    named = (
        our_names({name: number(value) for name, value in log.items()})
        for log in (metrics, skipped)
    )
    return dict(zip(("verl", "verl_without_updates"), named, strict=True))


class RecordedEngine:
    """An engine that answers with the recorded responses."""

    has_weights, routing = True, False
    rebuilds = 0

    def __init__(self, batch: RolloutBatch) -> None:
        self._batch = batch

    def generate(self, prompts: Any, sampling: Any, seeds: Any) -> RolloutBatch:
        return self._batch

    def publish_from(self, source: Any, *, version: int) -> PublishReport:
        report: PublishReport = source(self, version=version)
        return report

    def publish(self, tensors: Any, *, version: int, prepared: Any) -> PublishReport:
        return PublishReport.of(list(tensors), {}, version, {})

    def sleep(self) -> None: ...


def in_local(config: Config, kind: str) -> dict[str, Any]:
    _, columns = recorded(config, kind)
    prompts, responses, logged = (
        [row.tolist() for row in columns[name].unbind()]
        for name in ("prompts", "responses", "rollout_log_probs")
    )
    reasons = finish_reasons(config, responses)
    conversations = None
    if kind:
        conversations = [
            Conversation(
                prompt,
                response_token_ids=response,
                log_probs=log_probs,
                turns=spans_of(mask),
                failures=1,
                finish_reason=reason,
            )
            for prompt, response, log_probs, mask, reason in zip(
                prompts,
                responses,
                logged,
                [row.tolist() for row in columns["response_mask"].unbind()],
                reasons,
                strict=True,
            )
        ]
    rewards = [Scored(float(row.sum())) for row in columns["rm_scores"].unbind()]
    batch = RolloutBatch(
        prompts, responses, logged, reasons, weight_version=0, conversations=conversations
    )
    engine: Any = RecordedEngine(batch)
    trainer = LocalTrainer(config, prepare_run(config), engine)
    trainer.rewards = lambda prompts, responses, texts=None: rewards  # type: ignore[method-assign]  # the recorded ones
    return {
        name: number(value) for name, value in (trainer.train_step() | trainer.timer.pop()).items()
    }


def main(folder: Path, output: str, kind: str = "") -> None:
    torch.distributed.init_process_group("cpu:gloo")
    make_files(folder)
    os.chdir(folder)
    keys = KEYS | (LIMIT if kind else {})
    try:
        backends = in_verl(changed(keys), kind)
    except UserError as error:
        backends = {"error": {"what": str(error)}}
    else:
        backends["local"] = in_local(changed(keys | {"backend": "local"}), kind)
    Path(output).write_text(json.dumps(backends), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
