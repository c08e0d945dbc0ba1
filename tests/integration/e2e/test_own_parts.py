"""A scheme, a kernel, an optimizer and an objective from files of the user's, in two steps through `qarl train`.

The files are examples/own_*.py, which CONTRIBUTING.md quotes. They use public seams only, and no file of qarl/ knows
them. `test_verl_own_parts.py` does the same in verl.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from checkout import ROOT
from cpu_features import needs_w4a16_cpu

from qarl.checkpoint.model_files import read_tensors
from qarl.kernels.int4 import unpack_int4
from qarl.metrics.tracker import read_metrics

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]

PARTS = [
    str(ROOT / f"examples/own_{part}.py") for part in ("scheme", "kernel", "optimizer", "objective")
]
CHOSEN = [
    "quant.scheme=w4a16_symmetric",
    "quant.kernels=qarl",
    "optim.name=lion",
    "optim.lr=1e-4",
    "actor.loss=cispo",
]
SMALL = [
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=2",
    "rollout.n=4",
    "rollout.cpu_kvcache_space_gib=0.25",
    "actor.ppo_micro_batch_size_per_gpu=8",
    "actor.log_prob_micro_batch_size_per_gpu=16",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.logger=[console]",
]


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qarl.train", "config=quickstart.yaml", *SMALL, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )


def test_own_parts_train_without_a_mismatch(tmp_path):
    plugins = f"plugins=[{', '.join(PARTS)}]"
    done = train(plugins, *CHOSEN, f"output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr[-3000:]
    steps = read_metrics(tmp_path / "quickstart")
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["actor/grad_norm"] > 0
        assert metrics["mismatch/abs_max"] == 0.0
    assert "exact_w4a16" in done.stdout + done.stderr
    check_codes(tmp_path / "quickstart/export")


def check_codes(export) -> None:
    """The codes are those of the own scheme: from -7 to 7, and both ends are used."""
    packed = [tensor for name, tensor in read_tensors(export) if "weight_packed" in name]
    codes = torch.cat([unpack_int4(tensor).flatten() for tensor in packed])
    assert (codes.min().item(), codes.max().item()) == (-7, 7)


def test_without_the_plugins_nothing_of_it_is_known(tmp_path):
    done = train(CHOSEN[0], f"output_dir={tmp_path}")
    assert done.returncode == 2
    assert "quant.scheme" in done.stderr
    assert not (tmp_path / "quickstart").exists()
