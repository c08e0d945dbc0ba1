"""Configs of runs on verl, and what its replay buffer is made with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml
from checkout import ROOT

from qarl.config import Config, build_config
from qarl.config.unused_keys import RULES

NAMED = (
    f"actor_rollout_ref.model.path={ROOT}",
    f"data.train_files={ROOT / 'pyproject.toml'}",
    f"data.val_files={ROOT / 'pyproject.toml'}",
)
"""Keys of verl's command line with paths that exist, because verl's defaults do not."""


def quickstart(**changes: object) -> Config:
    values = yaml.safe_load((ROOT / "configs" / "quickstart_verl.yaml").read_text())
    for dotted, value in changes.items():
        section, _, leaf = dotted.rpartition(".")
        (values.setdefault(section, {}) if section else values)[leaf] = value
    for (
        rule
    ) in RULES:  # a key of the file that a change switches off is dropped, as on the command line
        if rule.decider in changes and not rule.reads(changes[rule.decider]):
            for section, _, leaf in (key.partition(".") for key in rule.keys if key not in changes):
                values.get(section, {}).pop(leaf, None)
    return build_config(values)


# Differs between the answers of a random model.
REWARD = """
def length_reward(data_source, solution_str, ground_truth, extra_info=None):
    return min(len(solution_str) / 64, 1.0)
"""


def start(command: list[str], **variables: str) -> None:
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    run = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


def run_quickstart(
    output: Path,
    model: Path,
    data: Path,
    changes: dict[str, object],
    config: str = "quickstart_verl",
) -> Path:
    """Two steps at learning rate 0. Returns the run's folder. `config`: the shipped config."""
    settings = {
        "output_dir": output,
        "model.path": model,
        "data.train_files": f"[{data}]",
        "data.val_files": f"[{data}]",
        "data.train_batch_size": 4,
        "data.max_response_length": 16,
        "rollout.cpu_kvcache_space_gib": 0.25,
        "actor.ppo_mini_batch_size": 2,
        "optim.lr": 0.0,
        "trainer.total_training_steps": 2,
        "trainer.test_freq": -1,
        "trainer.logger": "[console]",
    }
    overrides = [f"{key}={value}" for key, value in (settings | changes).items()]
    start([sys.executable, "-m", "qarl.train", f"config={config}.yaml", *overrides])
    return output / config


KWARGS = {
    "trainer_mode": "sync",
    "trainer_config": {},
    "max_off_policy_threshold": 8,
    "max_off_policy_strategy": "drop",
    "sampler_kwargs": {"filter_groups": False, "sync_refill_failed_groups": False},
    "refill_fn": print,
}
