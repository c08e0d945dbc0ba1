"""Weights for the mismatch that are divided by their mean over a step's batch (`rollout_is_batch_normalize`).

Only a trainer sees the whole batch. verl's trainer computes the weights that verl has, of tokens or of whole responses,
if the section `algorithm.rollout_correction` asks for them. QaRL's trainer computes the others in the same place, after
the advantages: geometric and clipped ones, and those of `policy_loss.correction` on verl's command line. Both hand them
on as the column `rollout_is_weights`. Without it the loss would divide by the mean of a micro-batch, so it refuses to.
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.workers.utils.padding import response_to_nested

from qarl.config.actor import RolloutCorrectionConfig
from qarl.objectives.loss import correction_weights
from qarl.verl.config_classes import correction_of
from qarl.verl.keys import CORRECTION, POLICY_LOSS
from qarl.verl.refusals import Conflict

COLUMNS = ("response_mask", "old_log_probs", "rollout_log_probs")
"""Columns of a batch from which the weights are computed."""
WEIGHTS = "rollout_is_weights"
"""verl's column of weights."""


def normalised_by_qarl(config: Any) -> RolloutCorrectionConfig | None:
    """Return the correction whose weights QaRL's trainer computes, or None if verl's trainer or the loss does.

    `config`: verl's, whole."""
    correction = correction_of(OmegaConf.select(config, POLICY_LOSS))
    if not normalises(correction) or OmegaConf.select(config, f"{CORRECTION}.rollout_is"):
        return None
    return correction


def with_weights(batch: Any, config: Any, queue: Any) -> Any:
    """Write the weights that QaRL's trainer computes, if there are any, to a batch in TransferQueue, and return it.

    `config`: verl's, whole. `queue`: the module `transfer_queue`."""
    correction = normalised_by_qarl(config)
    if correction is None:
        return batch
    rows: dict[str, Any] = {"keys": batch.keys, "partition_id": batch.partition_id}
    data = queue.kv_batch_get(**rows, select_fields=list(COLUMNS))
    return queue.kv_batch_put(**rows, fields=weights_of(data, correction))


def normalises(correction: RolloutCorrectionConfig) -> bool:
    return correction.rollout_is is not None and correction.rollout_is_batch_normalize


def weights_of(data: Any, correction: RolloutCorrectionConfig) -> TensorDict:
    """Return `WEIGHTS` of all rows of a batch, from its `COLUMNS`. Both are nested tensors, [rows, tokens of each]."""
    mask = data["response_mask"]
    padded = data.select(*COLUMNS).to_padded_tensor()
    weights = correction_weights(
        padded["old_log_probs"],
        padded["rollout_log_probs"],
        padded["response_mask"] != 0,
        correction,
    )
    assert weights is not None  # `normalises` has seen a weight
    return TensorDict({WEIGHTS: response_to_nested(weights, mask)}, batch_size=len(mask))


def without_batch(why: str) -> Conflict:
    """Return the conflict of normalised weights with a place that does not see the whole batch."""
    return Conflict(
        key=f"{POLICY_LOSS}.correction.rollout_is_batch_normalize",
        value=True,
        good="false, or trainer.v1.trainer_mode=qarl_sync",
        why=f"{why}, and the weights of a micro-batch would be divided by their own mean",
    )
