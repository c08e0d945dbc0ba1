"""Router replay in the local backend: where a batch's tokens go, in forward and backward, and what is logged of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_models import save_random_model
from transformers import AutoModelForCausalLM

from qarl.align.router import recorded_routing
from qarl.config import load_config
from qarl.config.level import Level
from qarl.metrics.phase_timer import PhaseTimer
from qarl.quant import get_scheme
from qarl.rollout.publish.manifest import PublishReport
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.mismatch_watch import watch
from qarl.trainer.policy import Policy

LAYERS, EXPERTS, TOP_K = 2, 4, 2
SEQUENCES = [([3, 4, 5], [7, 8, 9]), ([6, 3], [10, 11]), ([5], [12, 13, 14, 15])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("moe"), "qwen3_moe")


def make_policy(folder: Path, *, router_replay: str = "auto") -> Policy:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return Policy(
        model, get_scheme("bf16"), ("lm_head",), align=Level.LINEARS, router_replay=router_replay
    )


def batch_of(routing: list[torch.Tensor] | None) -> Batch:
    rollout = RolloutBatch(
        prompt_token_ids=[prompt for prompt, _ in SEQUENCES],
        response_token_ids=[response for _, response in SEQUENCES],
        rollout_log_probs=[[-1.0] * len(response) for _, response in SEQUENCES],
        finish_reasons=["length"] * len(SEQUENCES),
        weight_version=0,
        routed_experts=routing,
    )
    zeros = torch.zeros(len(SEQUENCES))
    return make_batch(rollout, zeros, zeros, pad_token_id=2)


def own_routing(policy: Policy) -> list[torch.Tensor]:
    """The model's own choice for each sequence, as an engine returns it: the last token's is missing."""
    routing = []
    for prompt, response in SEQUENCES:
        with torch.no_grad(), recorded_routing(policy.model) as record:
            policy.model(input_ids=torch.tensor([prompt + response]), use_cache=False)
        routing.append(record.experts()[:-1].to(torch.uint8))
    return routing


def shifted(routing: list[torch.Tensor]) -> list[torch.Tensor]:
    return [(layer + 1) % EXPERTS for layer in routing]


def log_probs(policy: Policy, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        parts = [
            policy.response_log_probs(batch, rows, temperature=1.0)
            for rows in batch.micro_batches(2)
        ]
    return torch.cat(parts)


def test_replaying_the_models_own_choice_changes_no_bit_and_counts_no_token(folder):
    policy = make_policy(folder)
    batch = batch_of(own_routing(policy))
    assert torch.equal(log_probs(policy, batch), log_probs(policy, batch_of(None)))
    assert batch.other_experts is not None and not batch.other_experts.any()


def test_other_experts_are_followed_and_each_known_token_is_counted(folder):
    policy = make_policy(folder)
    batch = batch_of(shifted(own_routing(policy)))
    replayed, own = log_probs(policy, batch), log_probs(policy, batch_of(None))
    assert (replayed - own).abs()[batch.response_mask].max() > 0.01
    assert batch.other_experts is not None and batch.routed_experts is not None
    known = (batch.routed_experts >= 0).all(-1).any(-1)
    assert known.sum() == sum(len(prompt) + len(response) - 1 for prompt, response in SEQUENCES)
    assert not batch.other_experts[~known].any()
    # A replay in the first layer moves the second one's own choice, so not all tokens need differ there.
    assert batch.other_experts[known].all()


def test_off_counts_and_does_not_follow(folder):
    policy = make_policy(folder, router_replay="off")
    batch = batch_of(shifted(own_routing(policy)))
    assert torch.equal(log_probs(policy, batch), log_probs(policy, batch_of(None)))
    assert batch.other_experts is not None and batch.other_experts.any()


def test_the_routers_of_the_reference_are_not_counted(folder, tmp_path):
    """The policy's routers choose as the rollout's did. Those of a reference with other weights do not."""
    policy, reference = make_policy(folder), make_policy(folder)
    with torch.no_grad():
        for layer in reference.model.model.layers:
            layer.mlp.gate.weight.neg_()
    keys = ("actor.use_kl_loss=true", "actor.loss=grpo", "trainer.report=false")
    settings = load_config(["config=quickstart.yaml", *keys, f"output_dir={tmp_path}"])
    routing = own_routing(policy)
    other = batch_of(routing)
    reference.batch_log_probs(other, settings)
    assert other.other_experts is not None and other.other_experts.any()
    trainer: Any = object.__new__(LocalTrainer)
    trainer.config, trainer.policy, trainer.reference = settings, policy, reference
    trainer.timer, trainer.step, trainer.updated, trainer.tokenizer = PhaseTimer(), 0, True, None
    trainer.engine = SimpleNamespace(rebuilds=0)
    trainer.source = SimpleNamespace(
        begin=lambda batch, seed: policy.batch_log_probs(batch, settings),
        confirm_or_recompute=None,
        mismatch=lambda batch: {},
        metrics=dict,
        messages=[],
        measured=None,
    )
    batch = batch_of(routing)
    trainer.rollout = lambda: (batch, {"rollout/preemptions": 0.0})
    trainer.update = lambda *_: {}
    trainer.publish = lambda: PublishReport(0, 1, 1, 0, 0, {})
    assert trainer.train_step()["mismatch/other_experts_frac"] == 0.0
    assert batch.reference_log_probs is not None and batch.reference_log_probs.any()


def test_rows_that_were_not_computed_are_not_counted(folder):
    """`actor.old_log_probs=auto` computes a sample of the rows, and the share of other experts is over these."""
    policy = make_policy(folder)
    batch = batch_of(shifted(own_routing(policy)))
    with torch.no_grad():
        policy.response_log_probs(batch, torch.tensor([1]), temperature=1.0)
    assert batch.routing_compared is not None and batch.routing_compared.nonzero().tolist() == [[1]]
    settings = load_config(["config=quickstart.yaml", "quant.align=off"])
    metrics = {"mismatch/abs_mean": 0.0, "rollout/preemptions": 0.0}
    assert watch(settings, policy, batch, metrics)[0]["mismatch/other_experts_frac"] == 1.0
