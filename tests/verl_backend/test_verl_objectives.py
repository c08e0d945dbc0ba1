"""Every objective and correction on verl's path against float64, from a run's config to the loss in verl's registry.

verl's own classes read the composed config, the function that verl's trainer calls computes the weights of the whole
batch, and the registered loss is called on micro-batches of two ranks, as verl's `ppo_loss` calls it.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from objective_cases import CORRECTIONS, LOSS_KEYS, B, parts, random_rows, run_config
from papers_losses import paper_loss, resolved_keys

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.config import omega_conf_to_dataclass

from qarl.config import Config, ConfigError
from qarl.config.objectives import LOSSES
from qarl.verl.plugin.loss import MICRO_BATCH, MicroBatch
from qarl.verl.run import verl_config

pytestmark = pytest.mark.usefixtures("own_environment")

ROWS = random_rows()


@cache
def base() -> Any:
    return verl_config(on_verl("tbpo", {}), on_cpu=True)


def on_verl(loss: str, correction: dict[str, Any], **more: Any) -> Config:
    return run_config(loss, correction, backend="verl", **more)


def composed(config: Config) -> Any:
    """verl's config of a run. Hydra composes the rest only once."""
    from qarl.verl.objectives import algorithm_keys, objective_keys

    found = base().copy()
    for key, value in (objective_keys(config) | algorithm_keys(config)).items():
        OmegaConf.update(found, key.removeprefix("+"), value, force_add=True)
    return found


def through_verl(config: Config, micro_batches: list[torch.Tensor], ranks: int) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a mini-batch, summed over micro-batches and averaged over ranks, as FSDP does."""
    whole = composed(config)
    actor: Any = omega_conf_to_dataclass(whole.actor_rollout_ref.actor)
    mask = ROWS["response_mask"]
    batch = SimpleNamespace(
        batch={
            "old_log_probs": ROWS["old_log_prob"],
            "rollout_log_probs": ROWS["rollout_log_prob"],
            "response_mask": mask,
        }
    )
    batch.union = lambda proto: batch.batch.update(rollout_is_weights=proto.batch["rollout_is_weights"]) or batch
    compute_rollout_correction_and_add_to_batch(batch, omega_conf_to_dataclass(whole.algorithm).rollout_correction)
    assert torch.equal(batch.batch["response_mask"] != 0, mask), "verl's trainer rejects nothing"
    weights = batch.batch.get("rollout_is_weights")
    total, gradient = 0.0, torch.zeros(mask.shape)
    for part in micro_batches:
        log_prob = ROWS["log_prob"][part].clone().requires_grad_()
        actor.global_batch_info.update(dp_size=ranks, batch_num_tokens=1, global_batch_size=B, loss_scale_factor=None)
        token = MICRO_BATCH.set(MicroBatch(ROWS["rollout_log_prob"][part], int(mask.any(1).sum()), int(mask.sum())))
        try:
            loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
                old_log_prob=ROWS["old_log_prob"][part],
                log_prob=log_prob,
                advantages=(ROWS["advantages"][:, None] * mask)[part],
                response_mask=mask[part],
                loss_agg_mode=actor.loss_agg_mode,
                config=actor,
                rollout_is_weights=None if weights is None else weights[part],
            )
        finally:
            MICRO_BATCH.reset(token)
        loss.backward()
        total += loss.item() / ranks
        gradient[part] = log_prob.grad / ranks
    return total, gradient


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_the_papers_formula(loss: str, correction: str) -> None:
    for keys in LOSS_KEYS[loss]:
        try:
            config = on_verl(loss, CORRECTIONS[correction], **keys)
        except ConfigError as error:
            # What contradicts itself is in test_objectives.py, and what verl cannot normalise is below.
            assert "rollout_correction" in str(error)
            return
        expected, gradient = paper_loss(loss, ROWS, resolved_keys(config), CORRECTIONS[correction])
        for micro, ranks in ((1, 1), (5, 2)):
            found, found_gradient = through_verl(config, parts(micro), ranks)
            assert found == pytest.approx(expected, rel=2e-5, abs=1e-6), (keys, micro)
            torch.testing.assert_close(found_gradient.double(), gradient, rtol=5e-5, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name.endswith("normalised")])
def test_only_verls_own_weights_are_normalised(name: str) -> None:
    correction = CORRECTIONS[name]
    if correction["rollout_is"] != "geometric" and correction["rollout_is_mode"] != "clip":
        assert on_verl("grpo", correction).rollout_correction.rollout_is_batch_normalize
        return
    with pytest.raises(ConfigError, match="only verl's trainer sees the whole batch"):
        on_verl("grpo", correction)
