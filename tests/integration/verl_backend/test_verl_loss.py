"""The losses as verl calls them: parts of a mini-batch, ranks, every objective against float64, errors."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from objective_cases import CORRECTIONS, LOSS_KEYS, parts, random_rows, run_config
from papers_losses import paper_loss, resolved_keys
from torch.utils._pytree import tree_leaves

from qarl.config import Config, ConfigError
from qarl.config.objectives import objective_names
from qarl.errors import UserError
from qarl.metrics.error_tokens import text_metrics, text_statistics
from qarl.metrics.step_metrics import mismatch_metrics
from qarl.tbpo import TBPOConfig, reduce_metrics
from qarl.verl.run import verl_config

pytest.importorskip("verl")

from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_weights,
)
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import PolicyLossConfig

from qarl.verl import batch_weights
from qarl.verl import step_measurements as plugin
from qarl.verl.config_classes import QaRLPolicyLossConfig, QuantFSDPEngineConfig, tbpo_config
from qarl.verl.loss import MICRO_BATCH, MicroBatch
from qarl.verl.step_measurements import StepStatistics

pytestmark = pytest.mark.usefixtures("own_environment")

BANDS = {
    "seq_clip_ratio_high": 0.05,
    "neg_seq_clip_ratio_low": 0.05,
    "neg_seq_clip_ratio_high": 0.06,
}
ROWS = random_rows()


def call(part, weights=None, **changes):
    """The registered loss on some rows, as verl's ppo_loss calls it. Returns its statistics."""
    micro_batch = MicroBatch(
        ROWS["rollout_log_prob"][part], int(ROWS["response_mask"].any(1).sum())
    )
    actor = SimpleNamespace(policy_loss=QaRLPolicyLossConfig(**BANDS), global_batch_info={})
    through_loss(actor, part, micro_batch, weights, **changes)
    return micro_batch.statistics


def through_loss(actor, part, micro_batch, weights=None, loss_agg_mode="seq-mean-token-mean"):
    """Loss and gradient of the rows `part` from the loss that is registered with verl."""
    log_prob, mask = ROWS["log_prob"][part].clone().requires_grad_(), ROWS["response_mask"]
    token = MICRO_BATCH.set(micro_batch)
    try:
        loss, metrics = get_policy_loss_fn(actor.policy_loss.loss_mode)(
            old_log_prob=ROWS["old_log_prob"][part],
            log_prob=log_prob,
            advantages=(ROWS["advantages"][:, None] * mask)[part],
            response_mask=mask[part],
            loss_agg_mode=loss_agg_mode,
            config=actor,
            rollout_is_weights=None if weights is None else weights[part],
        )
    finally:
        MICRO_BATCH.reset(token)
    assert metrics == {}
    loss.backward()
    return loss.item(), log_prob.grad


def test_errors_name_the_key_to_set():
    some, actor = (
        slice(0, 3),
        SimpleNamespace(policy_loss=QaRLPolicyLossConfig(), global_batch_info={}),
    )
    with pytest.raises(UserError, match=r"rollout_correction\.rollout_is"):
        call(some, weights=torch.ones(3, 1))
    with pytest.raises(UserError, match="loss_agg_mode=seq-mean-token-mean"):
        call(some, loss_agg_mode="token-mean")
    for micro_batch, words in (
        (MicroBatch(None, 3), r"rollout\.calculate_log_probs"),
        (None, "set it to fsdp2"),
    ):
        with pytest.raises(UserError, match=words):
            through_loss(actor, some, micro_batch)


def test_verls_plain_config_gives_the_papers_bands():
    assert tbpo_config(PolicyLossConfig(loss_mode="tbpo"), "seq-mean-token-mean") == TBPOConfig()
    ours = QaRLPolicyLossConfig(**BANDS, positive_band="two_sided", seq_tis_imp_ratio_cap=3.0)
    expected = TBPOConfig(**BANDS, positive_band="two_sided", seq_tis_imp_ratio_cap=3.0)
    assert tbpo_config(ours, "seq-mean-token-mean") == expected
    with pytest.raises(UserError, match="seq_clip_ratio_high"):
        tbpo_config(QaRLPolicyLossConfig(seq_clip_ratio_high=-1.0), "seq-mean-token-mean")


def test_quant_settings_refuse_what_they_do_not_know():
    config = QuantFSDPEngineConfig(strategy="fsdp2", quant={"scheme": "fp8", "ignore": "lm_head"})
    assert (config.quant.scheme, config.quant.ignore, config.quant.align) == (
        "fp8",
        ["lm_head"],
        "model",
    )
    with pytest.raises(UserError, match="grup_size"):
        QuantFSDPEngineConfig(strategy="fsdp2", quant={"grup_size": 32})


def test_statistics_of_a_step_are_those_of_all_its_tokens(monkeypatch):
    statistics, gathered = StepStatistics(), []
    monkeypatch.setattr(plugin, "_gather", lambda value, group: gathered.append(value) or [value])
    mask = ROWS["response_mask"]
    tokens = torch.randint(0, 2, mask.shape, generator=torch.Generator().manual_seed(0))
    text = {"responses": tokens, "rollout_log_probs": ROWS["rollout_log_prob"]}
    text |= {"advantages": ROWS["advantages"][:, None] * mask, "response_mask": mask}
    losses = []
    for part in parts(3):
        statistics.mini_batches += 1
        losses.append(call(part))
        statistics.add_objective(losses[-1])
        statistics.pairs.add(
            *(ROWS[name][part] for name in ("old_log_prob", "rollout_log_prob", "response_mask"))
        )
        statistics.add_text(
            TensorDict({name: tensor[part] for name, tensor in text.items()}), vocabulary=30
        )
    metrics = statistics.metrics()
    assert {type(leaf) for leaf in tree_leaves(gathered)} == {float, int, bool}, (
        "no tensor goes to the first rank"
    )
    expected_text = text_metrics([text_statistics(*text.values(), vocabulary=30)])
    assert "error_tokens/neg_garbled_frac" in expected_text and expected_text["rollout/entropy"] > 0
    expected = (
        mismatch_metrics(ROWS["old_log_prob"], ROWS["rollout_log_prob"], mask) | expected_text
    )
    expected |= reduce_metrics(losses)
    expected["actor/inside_band_frac_after_first"] = reduce_metrics(losses[1:])[
        "actor/inside_band_frac"
    ]
    assert all(metrics[name] == pytest.approx(value, rel=1e-6) for name, value in expected.items())


def test_routing_and_text_of_a_step_are_those_of_all_ranks(monkeypatch):
    """Two ranks have half of the rows each, and the first one gathers. Of 4 and 6 tokens 1 and 2 go elsewhere."""
    mask = ROWS["response_mask"]
    tokens = torch.randint(0, 2, mask.shape, generator=torch.Generator().manual_seed(0))
    text = {"responses": tokens, "rollout_log_probs": ROWS["rollout_log_prob"]}
    text |= {"advantages": ROWS["advantages"][:, None] * mask, "response_mask": mask}
    first, second = StepStatistics(), StepStatistics()
    half = len(mask) // 2
    for rank, rows in ((first, slice(0, half)), (second, slice(half, None))):
        rank.add_text(TensorDict({name: t[rows] for name, t in text.items()}), vocabulary=30)
    sent = []
    monkeypatch.setattr(plugin, "_gather", lambda value, group: sent.append(value))
    assert second.metrics(routing=(1, 4)) == {}
    monkeypatch.setattr(plugin, "_gather", lambda value, group: [value, *sent])
    expected = text_metrics([text_statistics(*text.values(), vocabulary=30)])
    metrics = first.metrics(routing=(2, 6))
    assert metrics.pop("mismatch/other_experts_frac") == 0.3
    assert metrics == pytest.approx(expected, rel=1e-12)
    assert expected["rollout/entropy"] != pytest.approx(text_metrics(first.text)["rollout/entropy"])


def test_the_lowest_temperature_of_a_batch_decides():
    """The limit on the mismatch grows as the temperature falls. verl's batches have one for all rows, or one each."""
    batch = TensorDict({"temperature": torch.tensor([1.0, 0.6, 0.8])}, batch_size=[3])
    assert plugin.temperature_of(batch) == pytest.approx(0.6)
    batch = TensorDict({"x": torch.zeros(3)}, batch_size=[3])
    assert plugin.temperature_of(batch) == 1.0
    tu.assign_non_tensor(batch, temperature=0.7)
    assert plugin.temperature_of(batch) == 0.7


@cache
def base() -> Any:
    """The two sections that decide the loss, resolved: a copy of verl's whole config takes 0.1 seconds."""
    whole: Any = OmegaConf.to_container(verl_config(on_verl("tbpo", {}), on_cpu=True), resolve=True)
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": whole["actor_rollout_ref"]["actor"]},
            "algorithm": whole["algorithm"],
        }
    )


def on_verl(loss: str, correction: dict[str, Any], **more: Any) -> Config:
    return run_config(loss, correction, backend="verl", **more)


def settings_of(config: Config) -> tuple[Any, Any]:
    """verl's actor and algorithm of a run. Hydra composes the rest only once."""
    from qarl.verl.config import algorithm_keys, objective_keys

    settings = base().copy()
    for key, value in (objective_keys(config) | algorithm_keys(config)).items():
        OmegaConf.update(settings, key.removeprefix("+"), value, force_add=True)
    return omega_conf_to_dataclass(settings.actor_rollout_ref.actor), omega_conf_to_dataclass(
        settings.algorithm
    )


def through_verl(
    actor: Any, algorithm: Any, micro_batches: list[torch.Tensor], ranks: int
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a mini-batch, summed over micro-batches and averaged over ranks, as FSDP does."""
    mask = ROWS["response_mask"]
    named = {
        "old_log_probs": "old_log_prob",
        "rollout_log_probs": "rollout_log_prob",
        "response_mask": "response_mask",
    }
    batch = SimpleNamespace(batch={name: ROWS[key] for name, key in named.items()})
    batch.union = lambda proto: (
        batch.batch.update(rollout_is_weights=proto.batch["rollout_is_weights"]) or batch
    )
    compute_rollout_correction_and_add_to_batch(batch, algorithm.rollout_correction)
    assert torch.equal(batch.batch["response_mask"] != 0, mask), "verl's trainer rejects nothing"
    weights = batch.batch.get("rollout_is_weights")
    own = batch_weights.normalised_by_qarl(whole_config(actor, algorithm))
    if own is not None:
        assert weights is None, "verl's trainer has computed them"
        weights = batch_weights.weights_of(nested_rows(), own)["rollout_is_weights"]
        weights = weights.to_padded_tensor(0.0, (len(mask), mask.shape[1]))
    total, gradient = 0.0, torch.zeros(mask.shape)
    for part in micro_batches:
        actor.global_batch_info.update(
            dp_size=ranks, batch_num_tokens=1, global_batch_size=len(mask), loss_scale_factor=None
        )
        micro_batch = MicroBatch(
            ROWS["rollout_log_prob"][part], int(mask.any(1).sum()), int(mask.sum())
        )
        loss, part_gradient = through_loss(actor, part, micro_batch, weights, actor.loss_agg_mode)
        total += loss / ranks
        gradient[part] = part_gradient / ranks
    return total, gradient


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("loss", objective_names())
def test_equals_the_papers_formula(loss: str, correction: str) -> None:
    for keys in LOSS_KEYS[loss]:
        try:
            config = on_verl(loss, CORRECTIONS[correction], **keys)
        except ConfigError as error:
            # What contradicts itself is in test_objectives.py.
            assert "rollout_correction" in str(error)
            return
        expected, gradient = paper_loss(loss, ROWS, resolved_keys(config), CORRECTIONS[correction])
        actor, algorithm = settings_of(config)
        for micro, ranks in ((1, 1), (5, 2)):
            total, total_gradient = through_verl(actor, algorithm, parts(micro), ranks)
            assert total == pytest.approx(expected, rel=2e-5, abs=1e-6), (keys, micro)
            torch.testing.assert_close(total_gradient.double(), gradient, rtol=5e-5, atol=1e-7)


NORMALISED = [name for name in CORRECTIONS if name.endswith("normalised")]
OF_VERL = [name for name in NORMALISED if "geometric" not in name and "clip" not in name]


@pytest.mark.parametrize("name", NORMALISED)
def test_one_trainer_normalises_weights(name: str) -> None:
    """verl's those that verl has. The loss, which sees a part of a batch, refuses to."""
    correction = CORRECTIONS[name]
    by_verl = name in OF_VERL
    actor, algorithm = settings_of(on_verl("grpo", correction))
    asked = algorithm.rollout_correction
    assert bool(asked["rollout_is"] and asked["rollout_is_batch_normalize"]) == by_verl
    assert (batch_weights.normalised_by_qarl(whole_config(actor, algorithm)) is None) == by_verl
    micro_batch = MicroBatch(ROWS["rollout_log_prob"], len(ROWS["response_mask"]), 10)
    with pytest.raises(UserError, match="has passed no weights") as refusal:
        through_loss(actor, slice(None), micro_batch)
    assert "trainer_mode=qarl_sync" in str(refusal.value)


@pytest.mark.parametrize("name", OF_VERL)
def test_weights_on_verls_command_line_are_verls(name: str) -> None:
    """`policy_loss.correction` alone asks QaRL's trainer, also for weights that verl has: they equal verl's."""
    correction = CORRECTIONS[name]
    actor, algorithm = settings_of(on_verl("grpo", correction))
    bounds = algorithm.rollout_correction["rollout_is_threshold"]
    algorithm.rollout_correction["rollout_is"] = None
    own = batch_weights.normalised_by_qarl(whole_config(actor, algorithm))
    assert own is not None
    mask = ROWS["response_mask"]
    expected, _ = compute_rollout_correction_weights(
        (ROWS["old_log_prob"] - ROWS["rollout_log_prob"]) * mask,
        mask.float(),
        rollout_is=correction["rollout_is"],
        rollout_is_threshold=bounds,
        rollout_is_batch_normalize=True,
    )
    weights = batch_weights.weights_of(nested_rows(), own)["rollout_is_weights"].unbind()
    for row, tokens in enumerate(weights):
        assert torch.equal(tokens * mask[row, : len(tokens)], expected[row, : len(tokens)])


def whole_config(actor: Any, algorithm: Any) -> Any:
    """The sections of verl's config that say who computes weights."""
    correction = dict(algorithm.rollout_correction)
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "actor": {"policy_loss": {"correction": dict(actor.policy_loss.correction)}}
            },
            "algorithm": {"rollout_correction": correction},
        }
    )


def nested_rows() -> TensorDict:
    """`ROWS` as TransferQueue gives them: each row with its own number of tokens."""
    names = {
        "response_mask": "response_mask",
        "old_log_probs": "old_log_prob",
        "rollout_log_probs": "rollout_log_prob",
    }
    lengths = [
        max(int(row.nonzero().max()) + 1, 1) if row.any() else 1 for row in ROWS["response_mask"]
    ]
    columns = {
        name: torch.nested.as_nested_tensor(
            [row[:length] for row, length in zip(ROWS[key], lengths, strict=True)],
            layout=torch.jagged,
        )
        for name, key in names.items()
    }
    return TensorDict(columns, batch_size=len(lengths))
