"""Warning signs: each on a made-up run that shows it, none on healthy noise, and the state after a resume."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from qarl.metrics.band_advice import how_to_set, scaled
from qarl.metrics.tracker import Tracker, read_metrics
from qarl.metrics.warning_signs import SIGNS, SignFinder, WarningSign

Metrics = dict[str, float]


def find(history: Sequence[Mapping[str, Any]]) -> list[WarningSign]:
    """The warnings of a whole run."""
    signs = SignFinder()
    return [warning for entry in history for warning in signs.add(int(entry["step"]), entry)]


def healthy(step: int, rng: random.Random) -> Metrics:
    """The noise of the quickstart's runs: gradient norms within a factor of 3, entropy and updates that fall slowly."""
    contributions = {
        f"actor/zero_centred_loss_{sign}": rng.gauss(0, 1e-4) for sign in ("pos", "neg")
    }
    mismatch = {sign: rng.gauss(0, 1e-3) for sign in ("pos", "neg")}
    update = 0.09 * math.exp(-step / 80) * math.exp(rng.gauss(0, 0.44))
    return {
        "rollout/entropy": 0.057 * math.exp(-step / 180) * math.exp(rng.gauss(0, 0.15)),
        "actor/grad_norm": 0.3 * math.exp(rng.gauss(0, 0.35)),
        "actor/update_size": update,
        "actor/ratio_size": update,
        "mismatch/training_ppl": 1.06 * math.exp(rng.gauss(0, 0.02)),
        "mismatch/abs_p999": 0.4 * math.exp(rng.gauss(0, 0.25)),
        "mismatch/k3": 8e-3 * math.exp(rng.gauss(0, 0.5)),
        **contributions,
        **{
            f"actor/rollout_{key[6:]}": value + mismatch[key[-3:]]
            for key, value in contributions.items()
        },
        "response_length/mean": 50 + rng.gauss(0, 1),
        "error_tokens/repetitive_frac": max(0.0, rng.gauss(0.01, 0.01)),
        "error_tokens/garbled_frac": max(0.0, rng.gauss(0.02, 0.02)),
        "actor/zero_advantage_frac": rng.choice([0.5, 0.75, 0.9, 1.0]) if step % 4 else 0.5,
        "critic/score/mean": 0.3,
    }


def a_run(
    change: Callable[[int, Metrics], None], *, steps: int = 100, seed: int = 0
) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    history: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        metrics = healthy(step, rng)
        change(step, metrics)
        history.append({"step": step, **metrics})
    return history


def after(
    step: int, name: str, factor: float = 1.0, plus: float = 0.0
) -> Callable[[int, Metrics], None]:
    def change(now: int, metrics: Metrics) -> None:
        if now >= step:
            metrics[name] = metrics[name] * factor + plus

    return change


def growing(name: str, per_step: float) -> Callable[[int, Metrics], None]:
    def change(now: int, metrics: Metrics) -> None:
        metrics[name] *= per_step ** max(0, now - 20)

    return change


def skewed(now: int, metrics: Metrics) -> None:
    """From step 50 on, the mismatch pushes negative samples, and nothing on the positive side weighs against it."""
    if now >= 50:
        metrics["actor/rollout_zero_centred_loss_neg"] -= 1e-2


def exploding(now: int, metrics: Metrics) -> None:
    """The perplexity explodes together with a quiet gradient norm, which stays below the limit of its own sign."""
    metrics["mismatch/training_ppl"] *= 3 if now >= 50 else 1
    quiet_norm(now, metrics)


def quiet_norm(now: int, metrics: Metrics) -> None:
    metrics["actor/grad_norm"] = 1.2 if now >= 50 else 0.3


def equal(now: int, metrics: Metrics) -> None:
    metrics["actor/zero_advantage_frac"] = 1.0 if now >= 50 else 0.5


def masked(now: int, metrics: Metrics) -> None:
    metrics["overlong/masked_frac"] = 1.0 if now >= 50 else 0.9


CASES: dict[str, tuple[str, Callable[[int, Metrics], None], int, int]] = {
    # sign, change, first step at which the change is there, last step at which it must have been reported
    "entropy triples": ("entropy", after(50, "rollout/entropy", 3), 50, 53),
    "entropy falls to a fifth": ("entropy", after(50, "rollout/entropy", 0.2), 50, 53),
    "gradient norm times 8": ("grad_norm", after(50, "actor/grad_norm", 8), 50, 53),
    "perplexity and gradient norm explode": ("perplexity", exploding, 50, 53),
    "updates ten times as large": ("update_size", after(50, "actor/update_size", 10), 50, 55),
    "updates grow 6% a step": ("update_size", growing("actor/update_size", 1.06), 30, 75),
    "ratios ten times as large as updates": (
        "ratio_mismatch",
        after(50, "actor/ratio_size", 10),
        50,
        55,
    ),
    "tail of δ grows 4% a step": ("delta_tail", growing("mismatch/abs_p999", 1.04), 40, 75),
    "k3 grows 5% a step": ("k3", growing("mismatch/k3", 1.05), 40, 75),
    "negative samples pushed alone": ("skew", skewed, 50, 70),
    "responses twice as long": ("length", after(50, "response_length/mean", 2), 50, 54),
    "responses half as long": ("length", after(50, "response_length/mean", 0.5), 50, 54),
    "loops": ("repetition", after(50, "error_tokens/repetitive_frac", plus=0.3), 50, 54),
    "garbage": ("repetition", after(50, "error_tokens/garbled_frac", plus=0.3), 50, 54),
    "all rewards equal": ("equal_rewards", equal, 50, 54),
    "all responses cut off and left out": ("all_masked", masked, 50, 54),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("sign", "change", "first", "last"), CASES.values(), ids=CASES)
def test_each_sign_is_found_once_and_soon(
    sign: str, change: Callable[[int, Metrics], None], first: int, last: int, seed: int
) -> None:
    (warning,) = find(a_run(change, seed=seed))
    assert warning.sign == sign
    assert first <= warning.step <= last
    assert first - 1 <= warning.since_step <= warning.step
    assert warning.remedy == SIGNS[sign][1]


@pytest.mark.parametrize("sign", ["tail of δ grows 4% a step", "k3 grows 5% a step"])
def test_staleness_is_not_taken_for_a_mismatch(sign: str) -> None:
    """The mismatch to the rollout grows with the updates, if the rollout is of older weights."""
    grow = CASES[sign][1]

    def stale(now: int, metrics: Metrics) -> None:
        grow(now, metrics)
        metrics["staleness/age_mean"] = 1.0

    assert find(a_run(stale)) == []


@pytest.mark.parametrize("change", [after(50, "mismatch/training_ppl", 4), quiet_norm])
def test_one_of_perplexity_and_gradient_norm_is_not_both(
    change: Callable[[int, Metrics], None],
) -> None:
    assert find(a_run(change)) == []


@pytest.mark.parametrize("seed", range(50))
def test_healthy_runs_give_no_warning(seed: int) -> None:
    assert find(a_run(lambda step, metrics: None, steps=150, seed=seed)) == []


@pytest.mark.parametrize(
    ("sizes", "seen"),
    [
        ([0.31] * 5, "is 0.31 (median of 5 steps), at least 0.3"),
        ([0.31] * 4, None),
        ([0.29] * 40, None),
        ([0.07] * 20 + [0.16] * 10, "grew from 0.07 (in the first 20 steps) to 0.16"),
        ([0.07] * 20 + [0.14] * 10, None),
        ([0.07] * 20 + [0.16] * 5, None),
    ],
)
def test_the_size_of_updates_by_hand(sizes: list[float], seen: str | None) -> None:
    warnings = find(
        [{"step": step, "actor/update_size": size} for step, size in enumerate(sizes, 1)]
    )
    assert [warning.sign for warning in warnings] == ([] if seen is None else ["update_size"])
    assert seen is None or seen in warnings[0].text


@pytest.mark.parametrize(
    ("from_rollout", "k3", "ratio", "signs"),
    [
        (0.0, 1e-2, 0.4, ["update_size"]),
        (1.0, 0.0, 0.4, ["update_size"]),
        (1.0, 3e-4, 0.4, ["update_size"]),
        (1.0, 5e-4, 0.4, ["ratio_mismatch"]),
        (1.0, 5e-4, None, []),
        (0.0, 1e-2, 1.4, ["update_size", "ratio_mismatch"]),
    ],
)
def test_a_mismatch_is_not_taken_for_an_update(
    from_rollout: float | None, k3: float | None, ratio: float | None, signs: list[str]
) -> None:
    """If the old log-probs are the rollout's, both sizes contain it; with bypass_mode, only the ratio's. Without a
    ratio (TBPO, reinforce) there is no size of it."""
    metrics = {
        "actor/update_size": 0.4,
        "old_log_probs/from_rollout": from_rollout,
        "mismatch/k3": k3,
    }
    if ratio is not None:
        metrics["actor/ratio_size"] = ratio
    assert [
        warning.sign for warning in find([{"step": step, **metrics} for step in range(1, 10)])
    ] == signs


def test_updates_of_a_constant_size_are_seldom_taken_for_large_ones() -> None:
    """Without a trend, with the noise of the quickstart's runs (docs/lookup/results/warning_signs.md)."""
    warned = 0
    for seed in range(200):
        rng = random.Random(seed)
        sizes = [
            0.09 * min(1.0, step / 10) * math.exp(rng.gauss(0, 0.44)) for step in range(1, 151)
        ]
        warned += bool(
            find([{"step": step, "actor/update_size": size} for step, size in enumerate(sizes, 1)])
        )
    assert 0 < warned <= 10, "5% of 200 runs"


def write(run_dir: Path, history: list[dict[str, Any]], capsys: Any, *, start_step: int = 0) -> str:
    with Tracker(run_dir, ["console"], 100, {}, start_step=start_step) as tracker:
        for entry in history:
            tracker.log(
                {name: value for name, value in entry.items() if name != "step"}, step=entry["step"]
            )
    return str(capsys.readouterr().out)


def warnings_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "warnings.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def two_signs(now: int, metrics: Metrics) -> None:
    after(30, "actor/grad_norm", 8)(now, metrics)
    after(60, "rollout/entropy", 3)(now, metrics)


@pytest.mark.parametrize("resumed_after", [20, 45, 80])
def test_a_resumed_run_says_the_same(tmp_path: Path, capsys: Any, resumed_after: int) -> None:
    """It was interrupted at step 90, its checkpoint is of an earlier step, and the steps since are run again."""
    whole = a_run(two_signs)
    write(tmp_path / "whole", whole, capsys)
    write(tmp_path / "resumed", whole[:90], capsys)
    out = write(tmp_path / "resumed", whole[resumed_after:], capsys, start_step=resumed_after)
    assert warnings_of(tmp_path / "resumed") == warnings_of(tmp_path / "whole")
    again = [
        warning["sign"]
        for warning in warnings_of(tmp_path / "whole")
        if warning["step"] > resumed_after
    ]
    assert out.count("warning sign") == len(again)
    assert read_metrics(tmp_path / "resumed") == read_metrics(tmp_path / "whole")


BAND = {
    "actor/band_p95_after_first": 4e-4,
    "actor/band_factor_p95_after_first": 0.5,
    "actor/inside_band_frac_after_first": 0.99,
}


def test_after_five_steps_the_run_says_which_bands_leave_five_percent_outside(
    tmp_path: Path, capsys: Any
) -> None:
    history = [{"step": step, **BAND} for step in range(1, 9)]
    history[2]["actor/band_factor_p95_after_first"] = 50.0
    out = write(tmp_path, history, capsys)
    (line,) = [line for line in out.splitlines() if "bands:" in line]
    assert line == (
        "step 5: bands: 1% of the responses are outside their band and teach nothing (after the first mini-batch, "
        "median of 5 steps); bands 0.5 times as wide would leave 5% outside"
    )
    assert warnings_of(tmp_path) == []
    assert "bands:" not in write(tmp_path, history[6:], capsys, start_step=6)


def test_bands_that_are_too_narrow_are_a_warning_that_names_the_keys(
    tmp_path: Path, capsys: Any
) -> None:
    """The doctor and the run say the same of the paper's bands at 64 tokens, where they are 16 times too narrow."""
    narrow = BAND | {
        "actor/band_factor_p95_after_first": 16.0,
        "actor/inside_band_frac_after_first": 0.3,
    }
    history = [{"step": step, **narrow} for step in range(1, 9)]
    out = write(tmp_path, history, capsys)
    (warning,) = warnings_of(tmp_path)
    assert (warning["sign"], warning["step"], warning["since_step"]) == ("narrow_bands", 5, 1)
    assert (
        "70% of the responses" in warning["text"]
        and out.count("bands:") == 1
        and warning["remedy"] in out
    )
    keys = "set actor.seq_clip_ratio_high=6.4e-03, actor.neg_seq_clip_ratio_low=4.8e-03, actor.neg_seq_clip_ratio_high"
    assert (
        warning["remedy"].startswith(keys)
        and "actor.band_scaling=length with bands of 4.0e-04" in warning["remedy"]
    )
    assert how_to_set({}, scaled(1.0, 64)).startswith(keys)
    assert "band_scaling" not in how_to_set({"band_scaling": "length"}, 2.0)
    write(tmp_path / "resumed", history[:6], capsys)
    assert "bands:" not in write(tmp_path / "resumed", history[6:], capsys, start_step=6)
    assert warnings_of(tmp_path / "resumed") == [warning]


def test_without_a_second_mini_batch_there_is_no_advice(tmp_path: Path, capsys: Any) -> None:
    assert "bands:" not in write(
        tmp_path, [{"step": step, "actor/grad_norm": 1.0} for step in range(9)], capsys
    )
    still = [{"step": step, **BAND, "actor/band_factor_p95_after_first": 0.0} for step in range(9)]
    assert "no sequence ratio has changed yet" in write(tmp_path / "still", still, capsys)
