"""Both sides describe one sampling distribution: temperature, top-p and top-k, with δ = 0."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import config
from transformers import AutoModelForCausalLM

from qarl.checks.generation import check_sampling
from qarl.config.level import Level
from qarl.config.schema import MIN_TEMPERATURE
from qarl.errors import UserError
from qarl.metrics.mismatch_limit import MismatchError
from qarl.metrics.step_metrics import mismatch_metrics
from qarl.quant import get_scheme
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.rollout.engine_config import may_preempt, sampling_params
from qarl.trainer import prepare
from qarl.trainer.batch import Batch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.mismatch_watch import watch
from qarl.trainer.policy import Policy
from qarl.trainer.prepare import prepare_run
from qarl.trainer.probe import probe

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]

OVERRIDES = (
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=8",
    "actor.log_prob_micro_batch_size_per_gpu=16",
    "actor.ppo_epochs=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.logger=[]",
    "actor.old_log_probs=recompute",
    "optim.lr=0",
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTrainer]:
    run = config(tmp_path_factory.mktemp("runs"), *OVERRIDES)
    trainer = LocalTrainer(run, prepare_run(run))
    with trainer.engine:
        trainer.publish()
        yield trainer


@pytest.fixture
def sampled(trainer: LocalTrainer):
    """A function that sets rollout keys for one test, and samples a batch of the next prompts."""
    before = trainer.config

    def sample(**rollout: float) -> tuple[Batch, dict[str, float]]:
        trainer.config = before.model_copy(
            update={"rollout": before.rollout.model_copy(update=rollout)}
        )
        return trainer.rollout()

    yield sample
    trainer.config, trainer.updated = before, False


KINDS = {
    "temperature": {"temperature": 0.7},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 3, which the tiny vocabulary feels": {"top_k": 3},
    "all three": {"temperature": 0.8, "top_p": 0.9, "top_k": 5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_old_log_probs_are_the_rollouts_and_r_is_1_for_the_whole_update(trainer, sampled, kind):
    """At learning rate 0, over two epochs of two mini-batches: other batching, other passes, one sampling mask."""
    batch, _ = sampled(**KINDS[kind])
    old = trainer.old_log_probs(batch)
    metrics = mismatch_metrics(old, batch.rollout_log_probs, batch.response_mask)
    assert metrics["mismatch/abs_max"] == 0
    assert batch.outside is None or not batch.outside.any()
    for size in (5, 8, 32):
        for rows in batch.micro_batches(size):
            new = trainer.policy.response_log_probs(
                batch, rows, temperature=trainer.config.rollout.temperature
            )
            assert torch.equal(new.detach(), old[rows])
    update_metrics = trainer.update(batch, old)
    assert update_metrics["actor/skipped_steps"] == 0 and math.isfinite(
        update_metrics["actor/grad_norm"]
    )
    assert update_metrics["actor/seq_ratio_abs_dev_max"] == 0
    again = trainer.policy.response_log_probs(
        batch, slice(0, 32), temperature=trainer.config.rollout.temperature
    )
    assert torch.equal(again.detach(), old)


def test_a_sampling_mask_stays_when_the_weights_move(trainer, sampled):
    """Every sampled token stays finite and gets a gradient though the nucleus of the new weights may lack it."""
    batch, _ = sampled(top_p=0.3)
    trainer.old_log_probs(batch)
    mask = batch.sampling_mask.clone()
    weight = trainer.policy.model.get_output_embeddings().weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(-0.5)  # the likeliest tokens become the least likely
        log_probs = trainer.policy.response_log_probs(batch, slice(0, 32), temperature=1.0)
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert log_probs.isfinite().all() and torch.equal(batch.sampling_mask, mask)
    fresh, _ = sampled(top_p=0.3)
    fresh.responses = torch.where(fresh.response_mask, 7, fresh.responses)  # not what was sampled
    log_probs = trainer.old_log_probs(fresh)
    assert log_probs.isfinite().all() and fresh.outside.any()
    metrics = {"mismatch/abs_mean": 0.0, "rollout/preemptions": 0.0}
    mismatch, warnings = watch(trainer.config, trainer.policy, fresh, metrics)
    assert mismatch["mismatch/outside_kept"] == float(fresh.outside.sum())
    assert [text for text in warnings if "sampled tokens are outside" in text]


def test_the_probe_is_repeatable_and_leaves_the_generators(trainer):
    state = torch.get_rng_state()
    first = probe(trainer)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert probe(trainer) == first
    torch.set_rng_state(state)
    assert first.startswith("probe: mean |δ| 0 over")


def test_a_broken_agreement_stops_the_run_before_its_first_update_and_warns_later(trainer, sampled):
    """The trainer's final norm is scaled: what a key that one side ignores does."""
    norm = trainer.policy.model.model.norm.weight
    before, step = norm.detach().clone(), trainer.step
    with torch.no_grad():
        norm.mul_(0.3)
    weights = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    try:
        with pytest.raises(MismatchError, match=r"quant\.align=model allows"):
            probe(trainer)
        with pytest.raises(MismatchError, match="disagree"):
            trainer.train_step()
        assert trainer.step == step and not trainer.updated
        assert all(
            torch.equal(p, weights[name]) for name, p in trainer.policy.model.named_parameters()
        )
        trainer.updated = True
        metrics = trainer.train_step()
        assert metrics["mismatch/over_limit"] == 1
        assert [text for text in trainer.warnings if "mean |δ| between trainer and engine" in text]
    finally:
        with torch.no_grad():
            norm.copy_(before)
        trainer.replace_policy(trainer.policy)  # whose masters are copies of the weights
        trainer.publish()
    trainer.updated = False
    assert trainer.train_step()["mismatch/over_limit"] == 0
    assert trainer.warnings == []


def test_preemptions_are_counted(trainer, pristine_model):
    """Room for 8 blocks of 128 tokens, and six responses that want three or four each."""
    trainer.engine.close()
    scheme = get_scheme("bf16")
    policy = Policy(
        AutoModelForCausalLM.from_pretrained(pristine_model, dtype=torch.bfloat16), scheme, ()
    )
    prompts = [list(range(3, 60)) for _ in range(6)]
    with RolloutEngine(
        EngineConfig(str(pristine_model), scheme, (), 420, kv_cache_gib=8 * 2**-14)
    ) as engine:
        engine.publish(policy.published_tensors(), version=1)
        few = engine.generate(prompts[:1], SamplingConfig(300, ignore_eos=True), seeds=[0])
        many = engine.generate(prompts, SamplingConfig(300, ignore_eos=True), seeds=list(range(6)))
        again = engine.generate(prompts[:1], SamplingConfig(300, ignore_eos=True), seeds=[0])
        (cache, *_) = engine.weights.kv_caches()
    assert few.preemptions == again.preemptions == 0 and many.preemptions > 0
    assert 8 in cache.shape[:2]  # blocks
    blocks = (
        4 * engine.config.max_num_seqs + 1
    )  # four for each sequence of 420 tokens, and one that vLLM leaves free
    for spare, enough in ((0, True), (-1, False)):
        config = replace(engine.config, kv_cache_gib=(blocks + spare) * 2**-14)
        assert may_preempt(config, policy.model.config) is not enough
    assert few.response_token_ids[0] == many.response_token_ids[0] == again.response_token_ids[0]


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (
            SamplingConfig(4, temperature=math.nextafter(MIN_TEMPERATURE, 0)),
            f"would use temperature={MIN_TEMPERATURE}",
        ),
        (SamplingConfig(4, temperature=2.5), "refuses these sampling values"),
        (SamplingConfig(4, top_p=0.0), "refuses these sampling values"),
    ],
)
def test_what_vllm_changes_or_refuses_is_our_error(sampling, words):
    assert (
        sampling_params(SamplingConfig(4, temperature=MIN_TEMPERATURE)).temperature
        == MIN_TEMPERATURE
    )
    with pytest.raises(UserError, match=words):
        sampling_params(sampling)


def test_sets_that_the_memory_cannot_hold_are_refused(tmp_path):
    run = config(tmp_path, *OVERRIDES, "rollout.top_p=0.9")
    check_sampling(run, level=Level.MODEL, vocabulary=100)
    with pytest.raises(UserError, match="GiB; the limit is 4 GiB"):
        check_sampling(run, level=Level.MODEL, vocabulary=20_000_000)
    check_sampling(config(tmp_path, *OVERRIDES), level=Level.LINEARS, vocabulary=20_000_000)


def test_truncation_on_a_gpu_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    """Also where the level falls back, as for experts."""

    def load(config):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(prepare.Policy, "load", load)
    run = config(tmp_path, *OVERRIDES, "rollout.top_k=20")
    with pytest.raises(AssertionError, match="were loaded"):
        prepare_run(run)
    monkeypatch.setattr("qarl.checks.machine.runs_on_cpu", lambda backend: False)
    monkeypatch.setattr("qarl.checks.model.runs_on_cpu", lambda backend: False)
    with pytest.raises(UserError, match="no GPU has shown"):
        prepare_run(run)
    monkeypatch.setattr("qarl.align.applied_level.model_unavailable", lambda *_: "is not built")
    with pytest.raises(UserError, match="fell back to linears"):
        prepare_run(run)
