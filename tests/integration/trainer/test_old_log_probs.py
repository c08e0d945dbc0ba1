"""`actor.old_log_probs`: which log-probs a step takes, what it proves before its update, and when it falls back."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkout import ROOT
from engine_helpers import config
from transformers import AutoModelForCausalLM
from updating_trainer import through_checkpoint

from qarl.config.level import Level
from qarl.metrics.phase_timer import PhaseTimer
from qarl.objectives.settings import objective_settings
from qarl.quant import get_scheme
from qarl.rollout.publish.manifest import PublishReport
from qarl.rollout.requests import RolloutBatch
from qarl.step.old_log_probs import Skipping, differing_tokens, last_bits
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.old_log_probs import OldLogProbs
from qarl.trainer.policy import Policy

pytestmark = pytest.mark.usefixtures("in_the_checkout")
PROMPTS, N = 4, 2  # two mini-batches of four rows: rows 4 to 7 are outside the first one
KEYS = (
    f"data.train_batch_size={PROMPTS}", f"rollout.n={N}", "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=2", "actor.log_prob_micro_batch_size_per_gpu=8", "quant.align=linears",
    "quant.mismatch_limit=5", "trainer.report=false",
)  # fmt: skip


STEPS = [
    ("first step", [], False),
    ("one clean pass", [0], True),
    ("a pass with a difference", [3], False),
    ("fell back", [0, "fell back", 1], False),
    ("twice is", [0, "fell back", 1, 0, 0], True),
    ("in a row", [0, "fell back", 1, 0, 2, 0], False),
    ("four times after the second", [0, "fell back", 1, 0, 0, "fell back", 1, 0, 0, 0], False),
    ("and then", [0, "fell back", 1, 0, 0, "fell back", 1, 0, 0, 0, 0], True),
]


@pytest.mark.parametrize(
    ("events", "skips"), [row[1:] for row in STEPS], ids=[row[0] for row in STEPS]
)
def test_when_the_next_step_skips(events, skips):
    state = Skipping()
    for event in events:
        state.fell_back() if event == "fell back" else state.recomputed(event)
    assert state.skips == skips


def test_nan_and_the_last_bit_are_differences_and_padding_is_not():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0]])
    mask = torch.tensor([[True, True, False]])
    padded = log_probs + torch.tensor([[0.0, 0.0, 1.0]])
    one_bit = torch.nextafter(log_probs, torch.zeros(1))
    not_a_number = log_probs * torch.tensor([[float("nan"), 1.0, 1.0]])
    for within, differing in ((last_bits("cpu"), (0, 2, 1)), (last_bits("cuda"), (0, 0, 1))):
        found = [
            differing_tokens(log_probs, other, mask, within)
            for other in (padded, one_bit, not_a_number)
        ]
        assert tuple(found) == differing
    assert differing_tokens(log_probs, log_probs + 2e-5, mask, last_bits("cuda")) == 2
    impossible = torch.full((1, 3), -torch.inf)
    assert differing_tokens(impossible, impossible, mask, last_bits("cuda")) == 0


def test_the_last_bits_are_above_what_an_h200_left_and_below_a_band():
    """benchmarks/results/gpu_check_2026-11-27.json: runs whose rows do not depend on each other."""
    parts = json.loads((ROOT / "benchmarks/results/gpu_check_2026-11-27.json").read_text())["parts"]
    largest = {
        name: max(step.get("mismatch/abs_max", 0.0) for step in parts[name]["report"]["steps"])
        for name in ("w8a8_model", "fp8_model", "w4a16_qarl", "fp8_qarl", "w4a16_model")
    }
    assert largest.pop("w4a16_model") > 100 * last_bits("cuda"), "Marlin's sums depend on the rows"
    assert max(largest.values()) < last_bits("cuda") / 3
    assert last_bits("cuda") < 3e-4 / 20 and last_bits("cpu") == 0


class Steps(LocalTrainer):
    """A trainer whose rollouts come from the list `batches`, and whose engine does not exist."""

    def __init__(self, folder: Any, settings: Any) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.config, self.objective, self.timer = (
            settings,
            objective_settings(settings),
            PhaseTimer(),
        )
        self.source, self.step, self.updated, self.warnings = (
            OldLogProbs(settings, self.old_log_probs),
            0,
            False,
            [],
        )
        self.replace_policy(Policy(model, get_scheme("w8a8"), ("lm_head",), align=Level.LINEARS))
        self.engine, self.tokenizer = SimpleNamespace(rebuilds=0), None
        self.spoil: dict[int, list[int]] = {}
        """Step -> rows whose first rollout log-prob is the next larger FP32 number."""
        self.passes: list[int] = []
        """Rows of each call of `old_log_probs`, by a step or by the test's rollout."""
        self.weights_at_pass: list[torch.Tensor] = []

    def rollout(self, **more: Any) -> tuple[Batch, dict[str, float]]:
        batch = responses(self.step)
        with torch.no_grad():
            exact = self.policy.response_log_probs(
                batch, slice(0, 8), temperature=self.config.rollout.temperature
            )
        batch.rollout_log_probs = exact
        for row in self.spoil.get(self.step, []):
            exact[row, 0] = torch.nextafter(exact[row, 0], torch.zeros(()))
        return batch, {"rollout/preemptions": 0.0}

    def old_log_probs(self, batch: Batch, only: torch.Tensor | None = None) -> torch.Tensor:
        self.passes.append(len(batch) if only is None else len(only))
        self.weights_at_pass.append(self.state())
        return super().old_log_probs(batch, only)

    def publish(self) -> PublishReport:
        return PublishReport(0, 1, 1000, 0, 0, {})

    def state(self) -> torch.Tensor:
        return torch.cat([master.detach().flatten() for master in self.optimizer._updated.values()])


def responses(step: int) -> Batch:
    """Eight responses of one to five tokens."""
    draw = torch.Generator().manual_seed(step)
    tokens = [
        torch.randint(3, 60, (1 + row % 5,), generator=draw).tolist() for row in range(PROMPTS * N)
    ]
    zeros = [[0.0] * len(response) for response in tokens]
    rollout = RolloutBatch(
        [[5, 6]] * len(tokens), tokens, zeros, ["stop"] * len(tokens), weight_version=step
    )
    return make_batch(rollout, torch.zeros(8), torch.tensor([1.0, -1.0] * 4), pad_token_id=0)


def run(
    folder, tmp_path, *keys: str, steps: int = 4, spoil: Any = ()
) -> tuple[Steps, list[dict[str, float]], list]:
    """A trainer after `steps` steps, their metrics and their messages."""
    trainer = Steps(
        folder, config(tmp_path, *KEYS, "optim.lr=1e-3", "optim.master_dtype=fp32", *keys)
    )
    trainer.spoil = dict(spoil)
    metrics, said = [], []
    for _ in range(steps):
        metrics.append(trainer.train_step())
        said.append([text for text in trainer.warnings if "old_log_probs" in text])
    return trainer, metrics, said


def column(metrics: list[dict[str, float]], name: str) -> list[float | None]:
    return [entry.get(f"old_log_probs/{name}") for entry in metrics]


def same_training(first: list[dict[str, float]], other: list[dict[str, float]]) -> bool:
    """Whether two runs logged the same numbers, but for the seconds and for what they checked."""
    checks = ("old_log_probs/", "mismatch/", "publish/")
    trained = [
        {key: v for key, v in step.items() if not key.startswith(checks)}
        for step in (*first, *other)
    ]
    return trained[: len(first)] == trained[len(first) :]


def test_auto_skips_the_pass_and_trains_the_same_bits(pristine_model, tmp_path):
    keys = ("actor.old_log_probs=auto", "actor.old_log_probs_sample=0.5")
    trainer, metrics, said = run(pristine_model, tmp_path, *keys)
    assert trainer.passes == [8, 2, 2, 2]  # of four other rows, two are checked
    assert column(metrics, "recomputed") == [1, 0, 0, 0] and column(metrics, "fallback") == [0] * 4
    assert column(metrics, "from_rollout") == [0, 1, 1, 1]
    assert column(metrics, "checked_frac") == [1, 0.75, 0.75, 0.75]
    assert column(metrics, "find_prob") == [None, 0.5, 0.5, 0.5]
    assert [entry["mismatch/abs_max"] for entry in metrics] == [0.0] * 4
    assert len(said[0]) == 1 and not any(said[1:])
    whole, expected, _ = run(pristine_model, tmp_path / "whole", "actor.old_log_probs=recompute")
    assert whole.passes == [8] * 4 and same_training(metrics, expected)
    assert torch.equal(trainer.state(), whole.state())


@pytest.mark.parametrize("row", [0, 3])
def test_a_difference_in_the_first_mini_batch_is_found_before_any_weight_changes(
    pristine_model, tmp_path, row
):
    """Even one of the last bit, in the last micro-batch, after gradients have been summed."""
    spoil = {2: [row]}
    keys = ("actor.old_log_probs=auto", "actor.old_log_probs_sample=0.25")
    trainer, metrics, said = run(pristine_model, tmp_path, *keys, steps=5, spoil=spoil)
    # The next two steps recompute, because a run that fell back needs two clean passes.
    assert trainer.passes == [8, 1, 1, 8, 8, 8]
    before, again = trainer.weights_at_pass[2:4]
    assert torch.equal(before, again)
    assert column(metrics, "fallback") == [0, 0, 1, 0, 0] and column(metrics, "recomputed") == [
        1,
        0,
        1,
        1,
        1,
    ]
    assert column(metrics, "from_rollout") == [0, 1, 0, 0, 0]
    assert (
        0 < metrics[2]["mismatch/abs_max"] < 1e-5 and metrics[2]["old_log_probs/checked_frac"] == 1
    )
    assert "differ from the rollout's" in said[2][0]
    whole, expected, _ = run(
        pristine_model, tmp_path / "whole", "actor.old_log_probs=recompute", steps=5, spoil=spoil
    )
    assert torch.equal(trainer.state(), whole.state()) and same_training(metrics, expected)


def test_a_difference_in_another_row_is_found_if_it_is_sampled(pristine_model, tmp_path):
    keys = ("actor.old_log_probs=auto", "actor.old_log_probs_sample=1")
    trainer, metrics, _ = run(pristine_model, tmp_path, *keys, spoil={1: [7]})
    assert trainer.passes == [8, 4, 8, 8, 8] and column(metrics, "fallback") == [0, 1, 0, 0]
    assert torch.equal(trainer.weights_at_pass[1], trainer.weights_at_pass[2])
    keys = ("actor.old_log_probs=auto", "actor.old_log_probs_sample=0")
    trainer, metrics, _ = run(pristine_model, tmp_path / "unchecked", *keys, spoil={1: [7]})
    assert trainer.passes == [8] and column(metrics, "fallback") == [0] * 4
    assert column(metrics, "checked_frac") == [1, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("key", ["rollout.top_p=0.9", "rollout.top_k=5"])
def test_auto_recomputes_where_the_pass_finds_the_tokens_of_top_k_and_top_p(tmp_path, key):
    passes, keys = [], [other for other in KEYS if not other.startswith("quant.align=")]
    source = OldLogProbs(
        config(tmp_path, *keys, "quant.align=model", "actor.old_log_probs=auto", key),
        lambda batch, only: passes.append(only) or batch.rollout_log_probs.clone(),
    )
    for step in range(3):
        source.begin(responses(step), seed=0)
    assert passes == [None] * 3 and not source.messages


@pytest.mark.verl
def test_rollout_takes_the_rollouts_log_probs_and_measures_them(pristine_model, tmp_path):
    spoil = {step: [0, 7] for step in range(3)}
    keys = ("actor.old_log_probs=rollout", "actor.loss=grpo")
    trainer, metrics, _ = run(pristine_model, tmp_path, *keys, steps=3, spoil=spoil)
    assert trainer.passes == [8] and column(metrics, "recomputed") == [1, 0, 0]
    assert column(metrics, "from_rollout") == [1, 1, 1], "the first pass only measures"
    assert (
        column(metrics, "checked_frac") == [1, 0.5, 0.5] and column(metrics, "fallback") == [0] * 3
    )
    assert all(entry["mismatch/abs_max"] > 0 for entry in metrics)
    batch = responses(0)
    batch.rollout_log_probs[batch.response_mask] = -3.0
    trainer.source.compute = lambda batch, only: torch.zeros_like(batch.rollout_log_probs)
    for _ in range(2):
        own = trainer.source.begin(batch, seed=0)
        assert torch.equal(own, batch.rollout_log_probs)


@pytest.mark.verl
def test_a_fallback_updates_as_if_the_pass_had_been_made_before(pristine_model, tmp_path):
    """The gradients of the first attempt are dropped, and the mismatch is weighted anew: against the rollout's own
    log-probs every weight was 1."""
    keys = ("actor.loss=grpo", "rollout_correction.rollout_is=token")

    def updated(*, falls_back: bool) -> torch.Tensor:
        trainer = Steps(pristine_model, config(tmp_path, *KEYS, "optim.lr=1e-3", *keys))
        batch, _ = trainer.rollout()
        own = batch.rollout_log_probs.clone()
        batch.rollout_log_probs[::3] -= 0.5
        if falls_back:
            trainer.update(batch, batch.rollout_log_probs, lambda *_: own)
        else:
            trainer.update(batch, own)
        assert batch.weights is not None
        delta = own - batch.rollout_log_probs
        torch.testing.assert_close(batch.weights, delta.exp() * batch.response_mask)
        return trainer.state()

    assert torch.equal(updated(falls_back=True), updated(falls_back=False))


def test_a_second_epoch_is_not_taken_for_the_old_policy(pristine_model, tmp_path):
    keys = ("actor.old_log_probs=auto", "actor.ppo_epochs=2")
    _, metrics, _ = run(pristine_model, tmp_path, *keys, steps=2)
    assert column(metrics, "fallback") == [0, 0] and column(metrics, "recomputed") == [1, 0]


def test_a_resumed_run_is_as_patient_and_first_recomputes(pristine_model, tmp_path):
    """A fallback doubles the patience, so after the resume two steps recompute, and without the counts only one. A run
    that skipped before the resume recomputes only the first step."""
    keys = ("actor.old_log_probs=auto", "actor.old_log_probs_sample=0")
    trainer, metrics, _ = run(pristine_model, tmp_path, *keys, steps=2, spoil={1: [0]})
    assert column(metrics, "fallback") == [0, 1] and trainer.source.schedule.skipping.patience == 2
    other = through_checkpoint(trainer, Steps(pristine_model, trainer.config))
    assert vars(other.source.schedule.skipping) == vars(trainer.source.schedule.skipping)
    assert column([other.train_step() for _ in range(3)], "recomputed") == [1, 1, 0]
    clean = through_checkpoint(other, Steps(pristine_model, trainer.config))
    assert clean.source.schedule.skipping.skips
    assert column([clean.train_step() for _ in range(2)], "recomputed") == [1, 0]
