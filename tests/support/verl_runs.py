"""Configs of runs on verl, what its replay buffer is made with, and programs of this folder in their own process."""

from __future__ import annotations

import os
import subprocess
import sys

import yaml
from checkout import ROOT

from qarl.config import Config, build_config
from qarl.config.unused_keys import RULES


def quickstart(**changes: object) -> Config:
    values = yaml.safe_load((ROOT / "configs" / "quickstart_verl.yaml").read_text())
    for dotted, value in changes.items():
        section, _, leaf = dotted.rpartition(".")
        (values.setdefault(section, {}) if section else values)[leaf] = value
    for rule in RULES:  # a key of the file that a change switches off is dropped, as on the command line
        if rule.decider in changes and not rule.reads(changes[rule.decider]):
            for section, _, leaf in (key.partition(".") for key in rule.keys if key not in changes):
                values.get(section, {}).pop(leaf, None)
    return build_config(values)


def run_program(name: str, *arguments: object, **variables: str) -> str:
    """Run a program of this folder on verl's platform `cpu`. Return its output."""
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "VERL_PLATFORM": "cpu"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/support" / name), *map(str, arguments)]
    run = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


RAYS = {"RAY_RAYLET_PID": "1", "RAY_JOB_ID": "01000000"}
"""Variables that Ray sets in its workers."""
KWARGS = {
    "trainer_mode": "sync",
    "trainer_config": {},
    "max_off_policy_threshold": 8,
    "max_off_policy_strategy": "drop",
    "sampler_kwargs": {"filter_groups": False, "sync_refill_failed_groups": False},
    "refill_fn": print,
}
