"""Weights that are divided by their mean over a step's batch: what QaRL's trainer for verl hands to the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from objective_cases import CORRECTIONS, run_config
from papers_losses import all_weights
from verl_advantages import columns_in_verl

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from hydra.utils import instantiate

LENGTHS = (3, 1, 4, 2, 2)
PADDING = "4_0_0"
"""The last row, which verl has added so that all ranks have as many."""
NORMALISED = [name for name in CORRECTIONS if name.endswith("normalised")]


def random_batch() -> tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor]]:
    """Rows by verl's key, and the same as padded tensors for `papers_losses`."""
    generator = torch.Generator().manual_seed(7)
    width = max(LENGTHS)
    mask = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    mask[-1] = False
    padded = {
        "response_mask": mask,
        "old_log_prob": -torch.rand(len(LENGTHS), width, generator=generator),
        "rollout_log_prob": -torch.rand(len(LENGTHS), width, generator=generator),
    }
    rows = {
        f"{row}_0_0": {
            "uid": str(row // 2),
            "response_mask": mask[row, :length].long(),
            "rm_scores": torch.cat([torch.zeros(length - 1), torch.tensor([float(row % 2)])]),
            "old_log_probs": padded["old_log_prob"][row, :length],
            "rollout_log_probs": padded["rollout_log_prob"][row, :length],
        }
        for row, length in enumerate(LENGTHS)
    }
    return rows, padded


@pytest.mark.parametrize("name", NORMALISED)
def test_the_trainer_hands_on_the_papers_weights(name: str) -> None:
    """In float64, over all rows but the one that pads. The mean of weights within the bounds is 1."""
    correction = CORRECTIONS[name]
    rows, padded = random_batch()
    columns = columns_in_verl(run_config("grpo", correction, backend="verl"), rows, (PADDING,))
    weights = [row["rollout_is_weights"] for row in columns]
    for weight, expected in zip(weights, all_weights(padded, correction), strict=True):
        # FP32: exp of a sum of at most four differences, a mean of eleven weights, and a quotient.
        torch.testing.assert_close(
            weight[: len(expected)].double(), expected, rtol=24 * 2**-24, atol=0
        )
    assert not weights[-1].any()
    level = correction["rollout_is"]
    counted = (
        torch.cat(weights[:-1]) if level == "token" else torch.stack([w[0] for w in weights[:-1]])
    )
    assert float(counted.double().mean()) == pytest.approx(1.0, abs=2**-20)


def test_weights_that_are_not_normalised_are_left_to_the_loss() -> None:
    rows, _ = random_batch()
    config = run_config("grpo", CORRECTIONS["weight_geometric_clip"], backend="verl")
    assert "rollout_is_weights" not in columns_in_verl(config, rows, (PADDING,))[0]


def test_verls_own_trainer_is_refused_before_ray_starts(capsys: pytest.CaptureFixture[str]) -> None:
    loss = "actor_rollout_ref.actor.policy_loss.correction"
    overrides = (
        "actor_rollout_ref.model.path=m",
        "algorithm.adv_estimator=grpo",
        "hydra.searchpath=[pkg://qarl.verl]",
        "+qarl=w4a16",
        "+qarl_loss=grpo",
        f"{loss}.rollout_is=geometric",
        f"{loss}.rollout_is_batch_normalize=true",
        "+actor_rollout_ref.actor.fsdp_config.quant.old_log_probs=recompute",
    )
    for mode, refused in (("sync", True), ("qarl_sync", False)):
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose(
                "ppo_trainer",
                overrides=[*overrides, f"trainer.v1.trainer_mode={mode}"],
                return_hydra_config=True,
            )
        with pytest.raises(SystemExit):  # the model is not there
            instantiate(config.hydra.callbacks.qarl).on_job_start(config, task_function=None)
        told = " ".join(capsys.readouterr().err.split())
        assert (f"{loss}.rollout_is_batch_normalize=True cannot be used" in told) == refused, told
