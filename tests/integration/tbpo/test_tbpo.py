"""`qarl.tbpo` against numbers worked by hand, a float64 formula written another way, and verl's GSPO."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tbpo_batches import WIDE, make_batch

from qarl.tbpo import TBPOConfig, reduce_metrics, tbpo_loss


def random_batch(seed: int, rows: int = 48, width: int = 9) -> dict[str, torch.Tensor]:
    """Responses of every kind: both signs and zero, inside and outside every edge, some empty."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[::7] = False
    advantages = torch.randn(rows, generator=generator)
    advantages[::5] = 0.0
    shift = 0.25 * torch.randn(rows, 1, generator=generator)
    mismatch = torch.randn(rows, 1, generator=generator)
    noise = 0.1 * torch.randn(rows, width, generator=generator)
    return {
        "log_prob": (old + shift + noise).requires_grad_(),
        "old_log_prob": old,
        "rollout_log_prob": old - mismatch,
        "advantages": advantages,
        "response_mask": mask,
    }


def gradient(loss: torch.Tensor, log_prob: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(loss, log_prob, retain_graph=True)
    return grad


def reference(batch: dict[str, torch.Tensor], config: TBPOConfig) -> tuple[float, torch.Tensor]:
    """Loss and gradient in float64, a response at a time: the product of token ratios, its root, and PPO's cases."""
    log_prob = batch["log_prob"].detach().double().requires_grad_()
    total, responses = torch.zeros((), dtype=torch.float64), 0
    for i in range(log_prob.shape[0]):
        tokens = [t for t in range(log_prob.shape[1]) if batch["response_mask"][i, t]]
        if not tokens:
            continue
        responses += 1
        a = float(batch["advantages"][i])
        moved, mismatched = torch.ones((), dtype=torch.float64), 1.0
        for t in tokens:
            moved = moved * torch.exp(log_prob[i, t]) / math.exp(batch["old_log_prob"][i, t])
            mismatched *= math.exp(batch["old_log_prob"][i, t]) / math.exp(
                batch["rollout_log_prob"][i, t]
            )
        r, w = moved ** (1 / len(tokens)), mismatched ** (1 / len(tokens))
        cap = config.seq_tis_imp_ratio_cap
        if config.mismatch_outside_cap == "drop" and not 1 / cap <= w <= cap:
            continue
        w = min(max(w, 1 / cap), cap)
        wider = (
            (config.band_reference_length / len(tokens)) ** 0.5
            if config.band_scaling == "length"
            else 1.0
        )
        if a > 0:
            low = (
                1 - wider * config.seq_clip_ratio_low
                if config.positive_band == "two_sided"
                else 0.0
            )
            high = 1 + wider * config.seq_clip_ratio_high
        else:
            low, high = (
                1 - wider * config.neg_seq_clip_ratio_low,
                1 + wider * config.neg_seq_clip_ratio_high,
            )
        if r.item() > high:
            total = total - w * high * a
        elif r.item() < low:
            total = total - w * low * a
        else:
            total = total - w * r * a
    loss = total / responses
    return loss.item(), gradient(loss, log_prob)


TWICE = {"band_scaling": "length", "band_reference_length": 8}
# advantage, r, w, options -> loss of a single two-token response, gradient on each of its tokens.
BY_HAND = [
    # Inside: -w r A = -1.5 * 1.1 * 2 = -3.3, a token -w r A / T = -3.3 / 2.
    (2.0, 1.1, 1.5, {}, -3.3, -1.65),
    # Above the upper edge: -1.5 * 1.2 * 2, constant.
    (2.0, 1.25, 1.5, {}, -3.6, 0.0),
    # Far below: nothing binds a positive sample there, -1.5 * 0.5 * 2 ...
    (2.0, 0.5, 1.5, {}, -1.5, -0.75),
    # ... but in the other reading the lower edge does: -1.5 * 0.9 * 2, constant.
    (2.0, 0.5, 1.5, {"positive_band": "two_sided"}, -2.7, 0.0),
    (2.0, 0.95, 1.5, {"positive_band": "two_sided"}, -2.85, -1.425),
    # Negative, inside its own band (outside the positive one): 0.8 * 1.25 * 1.
    (-1.0, 1.25, 0.8, {}, 1.0, 0.5),
    # Above: 0.8 * 1.3 * 1, constant; PPO would keep its gradient. Below: 0.8 * 0.9 * 1, constant.
    (-1.0, 1.5, 0.8, {}, 1.04, 0.0),
    (-1.0, 0.8, 0.8, {}, 0.72, 0.0),
    # w = 4 is cut to 2, w = 1/4 to 1/2: -2 * 1.1 * 2 and -0.5 * 1.1 * 2; or the response is left out.
    (2.0, 1.1, 4.0, {}, -4.4, -2.2),
    (2.0, 1.1, 0.25, {}, -1.1, -0.55),
    (2.0, 1.1, 4.0, {"mismatch_outside_cap": "drop"}, 0.0, 0.0),
    (2.0, 1.1, 0.25, {"mismatch_outside_cap": "drop"}, 0.0, 0.0),
    (0.0, 1.1, 1.5, {}, 0.0, 0.0),
    # 2 tokens, reference 8: the bands are sqrt(8 / 2) = 2 times as wide. Positive: up to 1.4, negative [0.8, 1.6].
    (2.0, 1.3, 1.0, TWICE, -2.6, -1.3),
    (2.0, 1.5, 1.0, TWICE, -2.8, 0.0),
    (-1.0, 0.85, 1.0, TWICE, 0.85, 0.425),
    (-1.0, 0.75, 1.0, TWICE, 0.8, 0.0),
    (-1.0, 1.7, 1.0, TWICE, 1.6, 0.0),
]


@pytest.mark.parametrize(("advantage", "r", "w", "options", "expected", "per_token"), BY_HAND)
def test_one_response_by_hand(
    advantage: float, r: float, w: float, options: dict[str, Any], expected: float, per_token: float
) -> None:
    batch = make_batch([r], [w], [2])
    loss, _ = tbpo_loss(
        advantages=torch.tensor([advantage]), config=TBPOConfig(**WIDE, **options), **batch
    )
    grad = gradient(loss, batch["log_prob"])
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(grad, torch.tensor([[per_token] * 2 + [0.0] * 3]), rtol=1e-5, atol=0)
    assert not torch.signbit(grad[grad == 0]).any()


def test_the_papers_bands_by_hand() -> None:
    # One-token responses moved by 5e-4 in log-prob: r = 1.0005 is above 1 + 4e-4 and within [1 - 3e-4, 1 + 7e-4].
    # Loss: -(1.0004 * 1 + 1.0005 * -1) / 2 = 5e-5, of which only the negative has a gradient: 1.0005 / 2.
    old = torch.zeros(2, 1)
    log_prob = (old + 5e-4).requires_grad_()
    loss, _ = tbpo_loss(
        log_prob, old, old, torch.tensor([1.0, -1.0]), torch.ones(2, 1), TBPOConfig()
    )
    assert loss.item() == pytest.approx(5e-5, abs=1.2e-7)
    torch.testing.assert_close(
        gradient(loss, log_prob), torch.tensor([[0.0], [0.50025]]), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("mismatch_outside_cap", ["truncate", "drop"])
@pytest.mark.parametrize("positive_band", ["upper", "two_sided"])
@pytest.mark.parametrize("band_scaling", ["none", "length"])
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_float64_formula_written_another_way(
    seed: int, band_scaling: str, positive_band: str, mismatch_outside_cap: str
) -> None:
    batch = random_batch(seed)
    options: dict[str, Any] = {
        "positive_band": positive_band,
        "mismatch_outside_cap": mismatch_outside_cap,
    }
    config = TBPOConfig(**WIDE, **options, band_scaling=band_scaling, band_reference_length=4)  # type: ignore[arg-type]  # a Literal
    loss, statistics = tbpo_loss(config=config, **batch)
    expected_loss, expected_grad = reference(batch, config)
    grad = gradient(loss, batch["log_prob"])
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-5, atol=0)
    # The comparison means something only if the batch has responses on every side of every edge.
    assert all(
        statistics[f"sum/{name}"]
        for name in ("pos_outside", "neg_outside", "inside", "above_cap", "below_cap")
    )


@pytest.mark.parametrize(("sign", "side"), [(1, "high"), (1, "low"), (-1, "high"), (-1, "low")])
def test_band_edges_are_inside_to_the_last_bit(sign: int, side: str) -> None:
    log_ratio = 2.0**-10 if side == "high" else -(2.0**-10)
    edge = abs(torch.expm1(torch.tensor(log_ratio)).item())
    old = torch.full((1, 4), -1.0)
    log_prob = (old + log_ratio).requires_grad_()
    field = f"{'neg_' if sign < 0 else ''}seq_clip_ratio_{side}"
    short = torch.nextafter(torch.tensor(edge), torch.tensor(0.0)).item()
    for width, learns in ((edge, True), (short, False)):
        config = TBPOConfig(positive_band="two_sided", **{field: width})
        loss, _ = tbpo_loss(
            log_prob, old, old, torch.tensor([float(sign)]), torch.ones(1, 4), config
        )
        assert (gradient(loss, log_prob) != 0).tolist() == [[learns] * 4]


def test_the_cap_itself_is_not_outside() -> None:
    old = torch.full((2, 1), -1.0)
    rollout = old - torch.tensor([[2.0**-2], [-(2.0**-2)]])
    cap = 1 + torch.expm1(torch.tensor(2.0**-2)).item()
    log_prob = old.clone().requires_grad_()
    for factor, dropped in ((1 + 1e-6, 0), (1 - 1e-6, 2)):
        config = TBPOConfig(seq_tis_imp_ratio_cap=cap * factor, mismatch_outside_cap="drop")
        loss, _ = tbpo_loss(log_prob, old, rollout, torch.ones(2), torch.ones(2, 1), config)
        assert (gradient(loss, log_prob) == 0).sum() == dropped


def test_garbage_at_masked_positions_changes_nothing() -> None:
    clean = random_batch(1)
    clean["advantages"] = clean["advantages"][:, None].expand_as(clean["log_prob"]).clone()
    dirty = dict(clean)
    masked = ~clean["response_mask"]
    for name, garbage in (
        ("log_prob", float("nan")),
        ("old_log_prob", float("inf")),
        ("rollout_log_prob", float("-inf")),
        ("advantages", float("nan")),
    ):
        dirty[name] = clean[name].detach().masked_fill(masked, garbage)
    dirty["log_prob"].requires_grad_()
    config = TBPOConfig(**WIDE)
    clean_loss, clean_statistics = tbpo_loss(config=config, **clean)
    dirty_loss, dirty_statistics = tbpo_loss(config=config, **dirty)
    grad = gradient(dirty_loss, dirty["log_prob"])
    assert torch.equal(dirty_loss, clean_loss)
    assert torch.equal(grad, gradient(clean_loss, clean["log_prob"]))
    assert (grad[masked] == 0).all()
    assert dirty_statistics == clean_statistics


def test_micro_batches_sum_to_the_whole() -> None:
    batch, config = random_batch(2), TBPOConfig(**WIDE)
    whole, statistics = tbpo_loss(config=config, **batch)
    count = int(batch["response_mask"].any(1).sum())
    parts, part_statistics = [], []
    for rows in (
        slice(0, 1),
        slice(1, 12),
        slice(12, 48),
    ):  # row 0 is empty: a micro-batch without any valid token
        part = {name: tensor[rows] for name, tensor in batch.items()}
        loss, part_metrics = tbpo_loss(config=config, global_batch_size=count, **part)
        parts.append(loss)
        part_statistics.append(part_metrics)
    total = torch.stack(parts).sum()
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(
        gradient(total, batch["log_prob"]), gradient(whole, batch["log_prob"])
    )
    assert reduce_metrics(part_statistics) == pytest.approx(reduce_metrics([statistics]), rel=1e-9)


def test_bf16_log_probs_are_upcast_before_the_subtraction() -> None:
    low = random_batch(3)
    for name in ("log_prob", "old_log_prob", "rollout_log_prob"):
        low[name] = low[name].detach().bfloat16()
    high = {
        name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        for name, tensor in low.items()
    }
    low["log_prob"].requires_grad_()
    high["log_prob"].requires_grad_()
    config = TBPOConfig(**WIDE)
    loss, _ = tbpo_loss(config=config, **low)
    expected, _ = tbpo_loss(config=config, **high)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    assert torch.equal(
        gradient(loss, low["log_prob"]), gradient(expected, high["log_prob"]).bfloat16()
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_extreme_ratios_stay_finite(extreme: float, sign: float) -> None:
    old = torch.full((2, 3), -1.0)
    # Row 0 has an extreme policy ratio, row 1 an extreme mismatch.
    log_prob = (old + torch.tensor([[extreme], [0.0]])).requires_grad_()
    rollout = old - torch.tensor([[0.0], [extreme]])
    loss, statistics = tbpo_loss(
        log_prob, old, rollout, torch.full((2,), sign), torch.ones(2, 3), TBPOConfig(**WIDE)
    )
    grad = gradient(loss, log_prob)
    clipped = {(1, 1): 1.2, (1, -1): 0.0, (-1, 1): 1.3, (-1, -1): 0.9}[
        int(sign), int(math.copysign(1, extreme))
    ]
    weight = 2.0 if extreme > 0 else 0.5
    assert loss.item() == pytest.approx(-sign * (clipped + weight) / 2)
    assert torch.equal(grad[0], torch.zeros(3))
    torch.testing.assert_close(grad[1], torch.full((3,), -sign * weight / 6))
    assert all(math.isfinite(value) for value in reduce_metrics([statistics]).values())


def test_without_any_valid_token_the_loss_is_a_zero_in_the_graph() -> None:
    log_prob = torch.full((2, 3), float("nan"), requires_grad=True)
    old = log_prob.detach()
    loss, statistics = tbpo_loss(
        log_prob, old, old, torch.full((2,), float("nan")), torch.zeros(2, 3), TBPOConfig()
    )
    assert loss.item() == 0
    assert torch.equal(gradient(loss, log_prob), torch.zeros(2, 3))
    assert reduce_metrics([statistics]) == {}


@pytest.mark.verl
@pytest.mark.parametrize("w", [1.0, 1.5])
def test_coincides_with_verls_gspo_except_for_negative_samples_above_the_band(w: float) -> None:
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import ActorConfig

    # r below, inside and above the band, for either sign; GSPO has one band for both signs, so ours get the same one.
    batch = make_batch([0.5, 1.1, 1.5] * 2, [w] * 6, [5, 3, 1, 4, 2, 5])
    advantages = torch.tensor([2.0, 1.0, 0.5, -2.0, -1.0, -0.5])
    config = TBPOConfig(
        seq_clip_ratio_high=0.2,
        neg_seq_clip_ratio_low=0.1,
        neg_seq_clip_ratio_high=0.2,
        seq_tis_imp_ratio_cap=2.0,
    )
    loss, _ = tbpo_loss(advantages=advantages, config=config, **batch)
    ours = gradient(loss, batch["log_prob"])

    mask = batch["response_mask"].float()
    verl_loss, _ = core_algos.compute_policy_loss_gspo(
        old_log_prob=batch["old_log_prob"],
        log_prob=batch["log_prob"],
        advantages=advantages[:, None] * mask,
        response_mask=mask,
        loss_agg_mode="seq-mean-token-mean",
        config=ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=0.1,
            clip_ratio_high=0.2,
        ),
        rollout_is_weights=torch.full_like(mask, w),
    )
    gspo = gradient(verl_loss, batch["log_prob"])
    torch.testing.assert_close(ours[:5], gspo[:5], rtol=1e-5, atol=1e-8)
    # The last response, A = -0.5 at r = 1.5: the loss differs by its clipping, w * 0.5 * (1.5 - 1.2) / 6.
    assert torch.equal(ours[5], torch.zeros(5))
    assert (gspo[5] > 0).all()
    assert (verl_loss - loss).item() == pytest.approx(w * 0.5 * 0.3 / 6, rel=1e-4)
