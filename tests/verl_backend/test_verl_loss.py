"""`loss_mode=tbpo` as verl calls it: normalisation over micro-batches and ranks, its errors, and the metrics' way."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

from torch.utils._pytree import tree_leaves
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import PolicyLossConfig

from qarl.errors import UserError
from qarl.metrics.error_tokens import text_metrics, text_statistics
from qarl.metrics.mismatch import mismatch_metrics
from qarl.tbpo import TBPOConfig, reduce_metrics, tbpo_loss
from qarl.verl.plugin import statistics as plugin
from qarl.verl.plugin.config import QuantFSDPEngineConfig, TBPOPolicyLossConfig, tbpo_config
from qarl.verl.plugin.loss import MICRO_BATCH, MicroBatch
from qarl.verl.plugin.statistics import StepStatistics

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


def test_verls_own_aggregation_counts_the_empty_rows(rows):
    """Why the loss does not use it: the same rows, divided by 12 where 10 hold anything."""
    from verl.trainer.ppo.core_algos import agg_loss

    values = rows["advantages"].abs() * rows["response_mask"]
    whole = agg_loss(values, rows["response_mask"], "seq-mean-token-mean")
    with_count = agg_loss(values, rows["response_mask"], "seq-mean-token-mean", dp_size=1, global_batch_size=B)
    assert float(with_count) == pytest.approx(float(whole) * 10 / 12)


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
        statistics.add_text({name: tensor[part] for name, tensor in text.items()}, vocabulary=30)
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
