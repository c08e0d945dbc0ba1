"""Whole runs whose answers are up to two batches old and span publishes, with a prompt that lags: it is waited for, or
dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bad_runs import row
from cpu_features import needs_vllm_cpu, needs_w4a16_cpu
from random_models import save_random_model
from verl_runs import run_quickstart

from qarl.metrics.tracker import read_metrics

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")
pytestmark = [needs_w4a16_cpu, needs_vllm_cpu, pytest.mark.timeout(1500)]

STALENESS, STEPS, PROMPTS = 2, 9, 16
REWARD = '''
import asyncio, time
from pathlib import Path

LOG = Path({log!r})

def steps():
    return len(LOG.read_bytes().splitlines()) if LOG.is_file() else 0

async def no_step_for(seconds):
    """Return when the trainer has stood still for so long: it waits for this answer."""
    seen, since = steps(), time.monotonic()
    while time.monotonic() - since < seconds:
        await asyncio.sleep(0.2)
        if steps() != seen:
            seen, since = steps(), time.monotonic()

async def some_steps(count):
    """Return when the trainer has gone on without this answer."""
    end = steps() + count
    while steps() < end:
        await asyncio.sleep(0.2)

async def score(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth == "late":
        await {lags}
    return len(set(solution_str.split())) / 300
'''
"""Differs between the answers of a random model. `lags`: what the answers to one of the prompts wait for."""


@pytest.mark.parametrize(
    ("strategy", "lags", "oldest"),
    [
        ("wait", "no_step_for(10)", 2 * STALENESS - 1),
        ("drop", f"some_steps({STALENESS + 1})", STALENESS),
    ],
)
def test_every_token_is_of_a_version_that_is_proved(
    tmp_path: Path, strategy: str, lags: str, oldest: int
) -> None:
    model = save_random_model(tmp_path / "model", vocab_size=512)  # rarely samples its EOS
    data = tmp_path / "train.parquet"
    rows = [row(f"t{3 + i} t{40 + i}", "late" if i == 3 else "7") for i in range(PROMPTS)]
    pq.write_table(pa.Table.from_pylist(rows), data)
    reward = tmp_path / "reward.py"
    reward.write_text(
        REWARD.format(log=str(tmp_path / "quickstart_async" / "verl.jsonl"), lags=lags)
    )
    changes: dict[str, object] = {
        "rollout.n": 2,
        "data.max_response_length": 300,
        "actor.ppo_mini_batch_size": 4,
        "actor.ppo_micro_batch_size_per_gpu": 4,
        "actor.log_prob_micro_batch_size_per_gpu": 8,
        "actor.old_log_probs_sample": 1.0,
        "optim.lr": 3e-3,
        "reward.function": f"{reward}:score",
        "reward.timeout_s": 600,
        "reward.workers": 8,  # up to four of them wait with the answers that lag
        "reward.check_ground_truths": "false",
        "trainer.staleness": STALENESS,
        "trainer.staleness_strategy": strategy,
        "trainer.save_minutes": -1,
        "trainer.val_before_train": "false",
        "trainer.total_training_steps": STEPS,
    }
    run_dir = run_quickstart(tmp_path, model, data, changes, config="quickstart_async")
    steps = [entry for entry in read_metrics(run_dir) if entry["step"] > 0]
    assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
    for entry in steps:
        assert entry["staleness/checked_frac"] == 1.0
        assert entry["mismatch/of_version_abs_max"] == 0.0
        assert entry["staleness/age_max"] <= oldest
        ratio = entry["staleness/ratio_abs_mean"]
        assert entry["mismatch/abs_mean"] == pytest.approx(ratio, rel=1e-4)
    assert max(entry["staleness/age_max"] for entry in steps) >= STALENESS
    assert max(entry["staleness/mixed_frac"] for entry in steps) > 0
    assert max(entry["staleness/ratio_abs_mean"] for entry in steps) > 1e-3
    waited = [entry["staleness/waited"] for entry in steps]
    dropped = [entry.get("training/off_policy/evicted_samples", 0) for entry in steps]
    assert (any(waited), any(dropped)) == (strategy == "wait", strategy == "drop")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"] and summary["staleness_age_max"] >= STALENESS
