"""The losses as verl calls them: parts of a mini-batch, ranks, every objective against float64, errors."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from objective_cases import CORRECTIONS, LOSS_KEYS, parts, random_rows, run_config
from papers_losses import paper_loss, resolved_keys
from torch.utils._pytree import tree_leaves

from qarl.config import Config, ConfigError
from qarl.config.objectives import LOSSES
from qarl.errors import UserError
from qarl.metrics.error_tokens import text_metrics, text_statistics
from qarl.metrics.mismatch import mismatch_metrics
from qarl.tbpo import TBPOConfig, reduce_metrics, tbpo_loss
from qarl.verl.run import verl_config

pytest.importorskip("verl")

from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import PolicyLossConfig

from qarl.verl.plugin import mismatch as plugin
from qarl.verl.plugin.config import QuantFSDPEngineConfig, TBPOPolicyLossConfig, tbpo_config
from qarl.verl.plugin.loss import MICRO_BATCH, MicroBatch
from qarl.verl.plugin.mismatch import StepStatistics

BANDS = {"seq_clip_ratio_high": 0.05, "neg_seq_clip_ratio_low": 0.05, "neg_seq_clip_ratio_high": 0.06}
B, T = 12, 9


@pytest.fixture
def rows():
    random = torch.Generator().manual_seed(0)
    mask = torch.arange(T)[None, :] < torch.tensor([9, 3, 5, 0, 7, 1, 9, 4, 0, 6, 8, 2])[:, None]
    log_prob = -torch.rand(B, T, generator=random)
    old = log_prob + 0.1 * torch.randn(B, T, generator=random)
    advantages = torch.randn(B, generator=random)
    return {
        "log_prob": log_prob,
        "old_log_prob": old,
        "rollout_log_prob": old + 0.8 * torch.randn(B, T, generator=random),
        "advantages": advantages[:, None] * mask,
        "response_mask": mask,
    }


def call(rows, part, *, dp_size=1, responses=10, **changes):
    """The registered loss on some rows, as verl's ppo_loss calls it: loss, gradient and statistics."""
    one = {name: tensor[part] for name, tensor in rows.items()}
    log_prob = one["log_prob"].clone().requires_grad_()
    config = SimpleNamespace(policy_loss=TBPOPolicyLossConfig(**BANDS), global_batch_info={"dp_size": dp_size})
    micro_batch = MicroBatch(one["rollout_log_prob"], responses)
    token = MICRO_BATCH.set(micro_batch)
    arguments = {
        "old_log_prob": one["old_log_prob"],
        "log_prob": log_prob,
        "advantages": one["advantages"],
        "response_mask": one["response_mask"],
        "loss_agg_mode": "seq-mean-token-mean",
        "config": config,
        "rollout_is_weights": None,
    }
    try:
        loss, metrics = get_policy_loss_fn("tbpo")(**(arguments | changes))
    finally:
        MICRO_BATCH.reset(token)
    assert metrics == {}
    loss.backward()
    return loss.detach(), log_prob.grad, micro_batch.statistics


def in_float64(rows):
    """The loss over all rows from its definition."""
    total, count = 0.0, 0
    names = ("log_prob", "old_log_prob", "rollout_log_prob")
    for i in range(B):
        valid = rows["response_mask"][i].numpy()
        if not valid.any():
            continue
        count += 1
        new, old, rollout = (rows[name][i].double().numpy()[valid] for name in names)
        advantage = float(rows["advantages"][i][valid][0])
        ratio, weight = np.exp((new - old).mean()), np.clip(np.exp((old - rollout).mean()), 0.5, 2.0)
        low, high = (-np.inf, 1.05) if advantage > 0 else (0.95, 1.06)
        total -= weight * np.clip(ratio, low, high) * advantage
    return total / count


@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("micro", [1, 3, 6])
def test_parts_add_up_to_the_loss_of_the_whole(rows, dp_size, micro):
    """verl averages over ranks what it sums over micro-batches; two rows are empty, and count nowhere."""
    log_prob = rows["log_prob"].clone().requires_grad_()
    whole, statistics = tbpo_loss(**{**rows, "log_prob": log_prob}, config=TBPOConfig(**BANDS))
    whole.backward()
    size = B // dp_size // micro
    loss, gradient, found = 0.0, torch.zeros(B, T), []
    for start in range(0, B, size):
        part = slice(start, start + size)
        one, gradient[part], one_statistics = call(rows, part, dp_size=dp_size)
        loss += float(one) / dp_size
        found.append(one_statistics)
    assert loss == pytest.approx(whole.item(), rel=1e-6)
    assert loss == pytest.approx(in_float64(rows), rel=1e-6)
    torch.testing.assert_close(gradient / dp_size, log_prob.grad, rtol=1e-6, atol=1e-9)
    merged, expected = reduce_metrics(found), reduce_metrics([statistics])
    assert merged.keys() == expected.keys()
    assert all(merged[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-12) for name in expected)


def test_errors_name_the_key_to_set(rows):
    some = slice(0, 3)
    with pytest.raises(UserError, match=r"rollout\.calculate_log_probs"):
        call_without_rollout()
    with pytest.raises(UserError, match=r"rollout_correction\.rollout_is"):
        call(rows, some, rollout_is_weights=torch.ones(3, T))
    with pytest.raises(UserError, match="loss_agg_mode=seq-mean-token-mean"):
        call(rows, some, loss_agg_mode="token-mean")
    config = SimpleNamespace(policy_loss=TBPOPolicyLossConfig(), global_batch_info={})
    with pytest.raises(UserError, match="strategy=fsdp2"):
        get_policy_loss_fn("tbpo")(None, None, None, None, "seq-mean-token-mean", config)


def call_without_rollout():
    config = SimpleNamespace(policy_loss=TBPOPolicyLossConfig(), global_batch_info={})
    token = MICRO_BATCH.set(MicroBatch(None, 3))
    try:
        return get_policy_loss_fn("tbpo")(None, None, None, None, "seq-mean-token-mean", config)
    finally:
        MICRO_BATCH.reset(token)


def test_verls_plain_config_gives_the_papers_bands():
    assert tbpo_config(PolicyLossConfig(loss_mode="tbpo"), "seq-mean-token-mean") == TBPOConfig()
    ours = TBPOPolicyLossConfig(**BANDS, positive_band="two_sided", seq_tis_imp_ratio_cap=3.0)
    expected = TBPOConfig(**BANDS, positive_band="two_sided", seq_tis_imp_ratio_cap=3.0)
    assert tbpo_config(ours, "seq-mean-token-mean") == expected
    with pytest.raises(UserError, match="seq_clip_ratio_high"):
        tbpo_config(TBPOPolicyLossConfig(seq_clip_ratio_high=-1.0), "seq-mean-token-mean")


def test_quant_settings_refuse_what_they_do_not_know():
    config = QuantFSDPEngineConfig(strategy="fsdp2", quant={"scheme": "fp8", "ignore": "lm_head"})
    assert (config.quant.scheme, config.quant.ignore, config.quant.align) == ("fp8", ["lm_head"], "model")
    with pytest.raises(UserError, match="grup_size"):
        QuantFSDPEngineConfig(strategy="fsdp2", quant={"grup_size": 32})


def test_statistics_of_a_step_are_those_of_all_its_tokens(rows, monkeypatch):
    statistics, gathered = StepStatistics(), []
    monkeypatch.setattr(plugin, "_gather", lambda value, group: gathered.append(value) or [value])
    tokens = torch.randint(0, 2, (B, T), generator=torch.Generator().manual_seed(0))
    found = []
    for start in range(0, B, 4):
        part = slice(start, start + 4)
        statistics.begin_mini_batch()
        found.append(call(rows, part)[2])
        statistics.add(found[-1])
        statistics.add_tokens(*(rows[name][part] for name in ("old_log_prob", "rollout_log_prob", "response_mask")))
        text = {"responses": tokens, "rollout_log_probs": rows["rollout_log_prob"], **rows}
        statistics.add_text(TensorDict({name: tensor[part] for name, tensor in text.items()}), vocabulary=30)
    metrics = statistics.metrics()
    assert {type(leaf) for leaf in tree_leaves(gathered)} == {float, int}, "no tensor goes to the first rank"
    once = text_statistics(tokens, rows["rollout_log_prob"], rows["advantages"], rows["response_mask"], vocabulary=30)
    expected_text = text_metrics([once])
    assert "error_tokens/neg_garbled_frac" in expected_text and expected_text["rollout/entropy"] > 0
    assert {name: metrics[name] for name in expected_text} == pytest.approx(expected_text)
    expected = mismatch_metrics(rows["old_log_prob"], rows["rollout_log_prob"], rows["response_mask"])
    expected |= reduce_metrics(found)
    expected["actor/inside_band_frac_after_first"] = reduce_metrics(found[1:])["actor/inside_band_frac"]
    assert all(metrics[name] == pytest.approx(value, rel=1e-6) for name, value in expected.items())


pytestmark = pytest.mark.usefixtures("own_environment")

ROWS = random_rows()


@cache
def base() -> Any:
    return verl_config(on_verl("tbpo", {}), on_cpu=True)


def on_verl(loss: str, correction: dict[str, Any], **more: Any) -> Config:
    return run_config(loss, correction, backend="verl", **more)


def composed(config: Config) -> Any:
    """verl's config of a run. Hydra composes the rest only once."""
    from qarl.verl.keys import algorithm_keys, objective_keys

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
        actor.global_batch_info.update(
            dp_size=ranks, batch_num_tokens=1, global_batch_size=len(mask), loss_scale_factor=None
        )
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
