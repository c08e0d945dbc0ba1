"""Whole verl runs with conversations of three turns on two ranks: δ is 0 on every token of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bad_runs import row
from checkout import ROOT
from cpu_features import needs_vllm_cpu, needs_w4a16_cpu
from metrics_table import misplaced
from random_models import save_random_model
from verl_runs import run_quickstart

from qarl.metrics.tracker import read_metrics
from qarl.report.samples import read_samples

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")
pytestmark = [
    pytest.mark.slow,
    needs_vllm_cpu,
    needs_w4a16_cpu,
    pytest.mark.timeout(900),
]
SUPPORT = ROOT / "tests/support"
ROLLOUT = "actor_rollout_ref.rollout"
LOOP = f"{ROLLOUT}.agent.default_agent_loop"
TURNS = f"{ROLLOUT}.multi_turn"
TOOLS = {
    f"{TURNS}.function_tool_path": f"{SUPPORT}/verl_tools.py",
    f"{TURNS}.format": "every_turn",
    f"{TURNS}.max_assistant_turns": 3,
}
CHANGES = {
    "rollout.n": 2,
    "data.max_prompt_length": 16,
    "data.max_response_length": 100,
    "actor.ppo_micro_batch_size_per_gpu": 2,
    "actor.log_prob_micro_batch_size_per_gpu": 4,
    "actor.old_log_probs": "recompute",
    "trainer.n_gpus_per_node": 2,
    "trainer.val_before_train": "false",
    "trainer.save_final": "false",
    "optim.lr": 1e-3,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.parquet"
    rows = [row(f"t{3 + i} t{20 + i} t{40 + i}") for i in range(16)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    steps = [entry for entry in read_metrics(run_dir) if entry["step"] > 0]
    assert [entry["step"] for entry in steps] == [1, 2]
    return steps


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "bf16"])
def test_an_environment(tmp_path: Path, model: Path, data: Path, scheme: str) -> None:
    changes = CHANGES | {
        "quant.scheme": scheme,
        "rollout.environment": f"{SUPPORT}/turn_environments.py:three_sums",
        "reward.function": "environment",
        "multi_turn.max_turn_length": 12,
    }
    run_dir = run_quickstart(tmp_path, model, data, changes)
    for entry in steps_of(run_dir):
        assert entry["mismatch/abs_max"] == 0
        assert entry["turns/mean"] > 2.5 and entry["turns/failures"] == 0
        assert entry["turns/context_tokens"] > 0
        assert 0 < entry["critic/score/mean"] <= 3
        assert misplaced(entry.keys() - {"step"}, "verl") == []
    samples = read_samples(run_dir)
    assert max(sample["turns"] for sample in samples) == 3
    assert all(0 in sample["of_model"] for sample in samples if sample["turns"] > 1)


@pytest.mark.parametrize("loop", ["qarl_tool_agent", "own"])
def test_verls_loop_of_tools_and_a_users_own(
    tmp_path: Path, model: Path, data: Path, loop: str
) -> None:
    verl = TOOLS | {LOOP: loop} | (own_loop(tmp_path, "OwnLoop") if loop == "own" else {})
    run_dir = run_quickstart(tmp_path, model, data, CHANGES | rewarded(tmp_path) | section(verl))
    for entry in steps_of(run_dir):
        assert entry["mismatch/abs_max"] == 0
        # A turn has no limit of its own here, so many fill the response.
        assert entry["turns/mean"] > 1 and entry["turns/max"] > 1
        assert misplaced(entry.keys() - {"step"}, "verl") == []


def test_a_users_loop_that_masks_nothing_is_stopped(
    tmp_path: Path, model: Path, data: Path
) -> None:
    """Tokens of tools have log-probs of 0 in the rollout, so the first mini-batch is over the limit on the mismatch."""
    verl = TOOLS | {LOOP: "own"} | own_loop(tmp_path, "UnmaskedLoop")
    with pytest.raises(AssertionError, match="mismatch_limit"):
        run_quickstart(tmp_path, model, data, CHANGES | rewarded(tmp_path) | section(verl))


def own_loop(folder: Path, name: str) -> dict[str, str]:
    """Keys of a user's loop."""
    file = folder / "loops.yaml"
    file.write_text(f"- name: own\n  _target_: verl_loops.{name}\n", encoding="utf-8")
    return {f"{ROLLOUT}.agent.agent_loop_config_path": str(file)}


def rewarded(folder: Path) -> dict[str, str]:
    file = folder / "reward.py"
    file.write_text(
        "def by_length(solution_str, **_):\n    return min(len(solution_str) / 256, 1.0)\n",
        encoding="utf-8",
    )
    return {"reward.function": f"{file}:by_length"}


def section(verl: dict[str, Any]) -> dict[str, str]:
    """The section `verl` of the command line."""
    return {"verl": "{" + ", ".join(f"{key}: {value}" for key, value in verl.items()) + "}"}
