"""`actor.old_log_probs` in verl: QaRL's trainer class and engine, with a real worker and without Ray and vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import RAYS, run_ranks
from verl_old_log_probs import COUNT, SCENARIOS

pytestmark = pytest.mark.verl


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each scenario shows, from one process."""
    folder = tmp_path_factory.mktemp("old_log_probs")
    run_ranks("verl_old_log_probs.py", 1, folder / "files", folder / "cases.pt", **RAYS)
    cases: dict[str, Any] = torch.load(folder / "cases.pt", weights_only=False)
    return cases


def column(run: dict[str, Any], name: str) -> list[float | None]:
    return [step.get(name) for step in run["metrics"]]


class Rows:
    """Rows in verl's form, whose keys are their numbers. The last of 16 is padding."""

    partition_id = "train"

    def __init__(self, keys: Sequence[int]) -> None:
        self.keys = [*keys]
        self.tags = [{"is_padding": True} if key == 15 else {} for key in keys]
        self.extra_info: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def select_keys(self, keys: Sequence[int]) -> Rows:
        return Rows(keys)


PASSES = {
    # Rows of each pass: the whole step has eight, the others are samples of the four outside the first mini-batch.
    "recompute": [8] * 5,
    "auto": [8, 2, 2, 2, 2],
    "unchecked": [8],
    "all_checked": [8, 4, 8, 8, 8, 4],
    "first_mini_batch": [8, 1, 8, 8, 8, 1],
    "first_mini_batch_recomputed": [8] * 5,
    "one_mini_batch": [8, 8, 8, 8],
    "rollout": [8],
    "two_epochs": [8, 1, 1, 1, 1],
}
FALLBACKS = {
    "all_checked": [0, 1, 0, 0, 0],
    "first_mini_batch": [0, 1, 0, 0, 0],
    "one_mini_batch": [0, 1, 0, 0, 0],
}
FROM_ROLLOUT = {"auto": [0, 1, 1, 1, 1], "first_mini_batch": [0, 0, 0, 0, 1], "rollout": [1] * 5}
CHECKED = {
    "auto": [1, 0.75, 0.75, 0.75, 0.75],
    "unchecked": [1, 0.5, 0.5, 0.5, 0.5],
    "first_mini_batch": [1, 1, 1, 1, 0.625],
    "rollout": [1, 0.5, 0.5, 0.5, 0.5],
}


@pytest.mark.parametrize("name", PASSES)
def test_which_rows_a_step_computes_and_when_it_falls_back(runs, name):
    run = runs[name]
    assert run["passes"] == PASSES[name]
    recomputes = SCENARIOS[name]["keys"]["actor.old_log_probs"] == "recompute"
    assert column(run, "old_log_probs/fallback") == (
        [None] * COUNT if recomputes else FALLBACKS.get(name, [0] * COUNT)
    )
    if name in FROM_ROLLOUT:
        assert column(run, "old_log_probs/from_rollout") == FROM_ROLLOUT[name]
    if name in CHECKED:
        assert column(run, "old_log_probs/checked_frac") == CHECKED[name]
    assert sum("differ from the rollout's" in text for text in run["said"]) == (name in FALLBACKS)
    assert run["lrs"] == [1, 2, 3, 4, 5]  # a dropped update does not count


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("auto", "recompute"),
        ("first_mini_batch", "first_mini_batch_recomputed"),
        ("all_checked", "recompute"),
    ],
)
def test_the_training_is_the_same_in_every_bit(runs, name, other):
    """`all_checked` has one log-prob that is one bit off: TBPO's weight rounds it away, and the old log-probs are the
    trainer's own again."""
    assert torch.equal(runs[name]["weights"], runs[other]["weights"])
    for metric in ("actor/grad_norm", "actor/pg_loss", "actor/lr", "actor/seq_ratio_abs_dev_max"):
        assert column(runs[name], metric) == column(runs[other], metric), metric


def test_a_dropped_update_has_changed_no_weight(runs):
    run = runs["first_mini_batch"]
    assert run["at_pass"][1] == run["at_pass"][2] != run["at_pass"][3]
    assert 0 < run["metrics"][1]["actor/mismatch/abs_max"] < 1e-5


def test_rollout_measures_the_mismatch_of_the_first_mini_batch(runs):
    assert column(runs["rollout"], "actor/mismatch/abs_max")[1] > 0
    assert column(runs["auto"], "actor/mismatch/abs_max") == [0] * COUNT


def test_the_limit_on_the_mismatch_stops_a_run_that_takes_the_rollouts_log_probs(runs):
    assert runs["over_the_limit"]["error"].startswith("MismatchError")


@pytest.mark.parametrize("name", ["constant", "constant_reinforce"])
def test_equal_rewards_leave_every_weight_as_it_was(runs, name):
    run = runs[name]
    assert len(run["metrics"]) == COUNT
    assert column(run, "actor/grad_norm") == [0.0] * COUNT
    assert torch.equal(run["weights"], run["first_weights"])


def test_a_checkpoint_keeps_the_counts(runs):
    """Whatever the scenario left: a resumed run is as patient as before."""
    before, after = runs["first_mini_batch"]["counts"]
    assert before == after and before["patience"] == 2
    before, after = runs["auto"]["counts"]
    assert before == after == {"clean": 1, "patience": 1}


@pytest.mark.parametrize(
    ("changes", "fraction", "others", "count"),
    [
        # Two ranks with eight rows each, of which the first two are in the first mini-batch; row 15 is padding.
        ({}, 0.25, [2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14], 4),
        ({"shuffle": True}, 0.25, [*range(15)], 4),
        ({"ulysses_sequence_parallel_size": 2}, 0.25, [*range(4, 15)], 3),
        ({}, 1.0, [2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14], 10),
    ],
)
def test_the_rows_that_two_ranks_check(
    changes: dict[str, Any], fraction: float, others: list[int], count: int
) -> None:
    """A quarter of eleven rows are three, and each rank gets as many as the other."""
    pytest.importorskip("verl")
    from omegaconf import OmegaConf

    from qarl.verl.trainer import QaRLTrainerSync

    quant = {"old_log_probs": "auto", "old_log_probs_sample": fraction}
    actor = {"ppo_mini_batch_size": 2, "fsdp_config": {"quant": quant}, **changes}
    rollout = {"n": 2, "temperature": 0.7, "log_prob_micro_batch_size_per_gpu": 4}
    trainer: Any = object.__new__(QaRLTrainerSync)
    trainer.config = OmegaConf.create(
        {
            "trainer": {"nnodes": 1, "n_gpus_per_node": 2},
            "actor_rollout_ref": {"actor": actor, "rollout": rollout},
            "data": {"seed": 3},
        }
    )
    seen: list[Any] = []
    trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=seen.append)
    trainer._entropy = lambda sample: 1.5
    trainer._differing = lambda sample, own: 0
    drawn = []
    for step in (1, 2):
        trainer.global_steps = step
        metrics = {"old_log_probs/checked_frac": 0.25}
        assert not trainer._sample_differs(Rows(range(16)), metrics)
        sample = seen.pop()
        assert len(sample.keys) == len({*sample.keys}) == count
        assert {*sample.keys} <= {*others}
        ranks = 2 // changes.get("ulysses_sequence_parallel_size", 1)
        assert count // ranks % sample.extra_info["micro_batch_size_per_gpu"] == 0
        assert sample.extra_info["temperature"] == 0.7
        assert metrics["old_log_probs/checked_frac"] == 0.25 + count / 16
        assert metrics["old_log_probs/find_prob"] == count / len(others)
        assert metrics["actor/entropy"] == 1.5
        drawn.append(sample.keys)
    assert drawn[0] != drawn[1] or fraction == 1.0
    assert trainer._other_rows(Rows(range(16))) == others


@pytest.mark.parametrize(("mode", "patience"), [("resume_path", 8), ("auto", 2)])
def test_the_counts_are_those_of_the_checkpoint_that_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, patience: int
) -> None:
    """A run may resume from another run's checkpoint, and have one of the same step itself."""
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from qarl.verl.trainer import COUNTS, QaRLTrainerSync

    for run, of_run in (("other", 8), ("own", 2)):
        folder = tmp_path / run / "global_step_3"
        folder.mkdir(parents=True)
        (folder / COUNTS).write_text(json.dumps({"clean": 1, "patience": of_run}))
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: 3)
    trainer: Any = object.__new__(QaRLTrainerSync)
    trainer.global_steps = 3
    section = {
        "resume_mode": mode,
        "resume_from_path": str(tmp_path / "other" / "global_step_3"),
        "default_local_dir": str(tmp_path / "own"),
    }
    actor = {"fsdp_config": {"quant": {"old_log_probs": "auto"}}}
    trainer.config = OmegaConf.create({"trainer": section, "actor_rollout_ref": {"actor": actor}})
    assert trainer._load_checkpoint() == 3
    assert trainer._schedule.skipping.patience == patience


def test_the_entropy_is_that_of_the_pass_or_of_the_sampled_rows(runs):
    """With all rows outside the first mini-batch sampled, the entropy is over these four; without a sample there is
    none. All rows are from one policy, so both are of one size."""
    whole = column(runs["recompute"], "actor/entropy")
    sampled = column(runs["auto"], "actor/entropy")
    assert sampled[0] == whole[0] and None not in sampled
    assert all(
        entropy == pytest.approx(other, rel=0.2)
        for entropy, other in zip(sampled, whole, strict=True)
    )
    assert sampled[1:] != whole[1:]
    assert column(runs["unchecked"], "actor/entropy")[1:] == [None] * (COUNT - 1)
