"""Whole verl runs to their ends: a shipped config of the paper with its six validation files, and a machine that is out
of memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bad_runs import row, write_rows
from checkout import ROOT
from cpu_features import needs_vllm_cpu, needs_w4a16_cpu
from random_models import save_random_model
from verl_runs import REWARD

from qarl.metrics.tracker import read_metrics

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")
pytestmark = [needs_w4a16_cpu, needs_vllm_cpu, pytest.mark.timeout(900)]

SOURCES = {"aime24": 4, "aime25": 4, "amc": 1, "math500": 1, "minerva": 1, "olympiadbench": 1}
"""The six data sources of the shipped configs, and the answers to each of their prompts: the column `__rollout_n__`,
which the shipped data has, too (32 for the smallest)."""
ROWS = {source: 2 + place % 3 for place, source in enumerate(SOURCES)}


def command(folder: Path, *overrides: str) -> list[str]:
    """`qarl train` with a shipped config, on a tiny model and tiny data in `folder`."""
    model = save_random_model(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    write_rows(
        str(folder / "train.jsonl"), [row(f"t{3 + i} t{20 + i} t{40 + i}") for i in range(16)]
    )
    files = []
    for place, (source, answers) in enumerate(SOURCES.items()):
        rows = [row(f"t{5 + place} t{6 + i}") for i in range(ROWS[source])]
        files.append(str(folder / f"{source}.jsonl"))
        write_rows(
            files[-1], [entry | {"data_source": source, "__rollout_n__": answers} for entry in rows]
        )
    settings = {
        "output_dir": folder,
        "model.path": model,
        "data.train_files": f"[{folder / 'train.jsonl'}]",
        "data.val_files": f"[{','.join(files)}]",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 16,
        "data.max_response_length": 16,
        "reward.function": f"{folder / 'reward.py'}:length_reward",
        "rollout.n": 2,
        "rollout.cpu_kvcache_space_gib": 0.25,
        "quant.group_size": 32,
        "actor.ppo_mini_batch_size": 2,
        "actor.ppo_max_token_len_per_gpu": 128,
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 2,
        "trainer.logger": "[console]",
    }
    given = [f"{key}={value}" for key, value in settings.items()]
    return [
        sys.executable,
        "-m",
        "qarl.train",
        "config=qwen2_5_math_1_5b_w4a16.yaml",
        *given,
        *overrides,
    ]


def run(
    folder: Path, *overrides: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], Path]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        command(folder, *overrides),
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    return done, folder / "qwen2_5_math_1_5b_w4a16"


def test_a_config_with_six_validation_files_runs_to_its_export(tmp_path):
    done, run_dir = run(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"] is True and summary["failed"] is None and summary["steps"] == 2
    assert (Path(summary["checkpoint"]) / "config.json").is_file()
    assert (run_dir / "report.html").is_file() and (run_dir / "plots" / "accuracy.png").is_file()
    assert summary["accuracy_mean"] == "each data source counts once"
    entries = {entry["step"]: entry for entry in read_metrics(run_dir)}
    for when, step in (("before", 0), ("after", 2)):
        figures = [entries[step][f"val/accuracy/{source}"] for source in SOURCES]
        assert figures == [summary[f"accuracy_{when}/{source}"] for source in SOURCES]
        assert summary[f"accuracy_{when}"] == pytest.approx(
            math.fsum(figures) / len(figures), abs=1e-12
        )
        for (
            source,
            answers,
        ) in SOURCES.items():  # verl's own figure, which knows nothing of the others
            verls = entries[step][f"val-core/{source}/acc/mean@{answers}"]
            assert entries[step][f"val/accuracy/{source}"] == pytest.approx(verls, abs=1e-6)
    assert "accuracy_after/olympiadbench" in done.stdout


def test_a_process_that_ray_kills_for_lack_of_memory_is_named(tmp_path):
    """Ray's own monitor kills: every machine has less than 1% of its memory free, as it is told."""
    limits = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}
    done, run_dir = run(tmp_path, "trainer.val_before_train=false", **limits)
    assert done.returncode == 2, done.stdout[-3000:] + done.stderr[-3000:]
    error = done.stderr[done.stderr.rindex("error: ") :]
    assert "Ray has killed a process of the verl run" in error and "Traceback" not in error
    assert "rollout.cpu_kvcache_space_gib" in error and "it starts fresh" in error
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"] is False and "out of memory" in summary["failed"]
    assert "before the checkpoint of its last step" in summary["not_exported"]
