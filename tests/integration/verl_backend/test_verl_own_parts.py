"""Own parts in verl: a scheme, a kernel, an optimizer and an objective from the user's files, in every process, and
QaRL's own kernel on both sides (`quant.kernels`).

`tests/integration/e2e/test_own_parts.py` does the same locally.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from bad_runs import row
from checkout import ROOT
from cpu_features import needs_w4a16_cpu
from random_models import save_random_model
from verl_runs import run_quickstart

from qarl.checkpoint.model_files import read_tensors
from qarl.kernels.int4 import unpack_int4
from qarl.metrics.tracker import read_metrics

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")
pytestmark = [needs_w4a16_cpu, pytest.mark.verl, pytest.mark.vllm, pytest.mark.timeout(900)]

KERNEL = """
import pathlib

from qarl.kernels.cpu.vllm_linears import VllmCpuWNA16Linear
from qarl.kernels.registry import register


@register
class Noted(VllmCpuWNA16Linear):
    name = "noted"

    @classmethod
    def linear(cls, x, prepared, bias):
        pathlib.Path("{marker}").touch()
        return super().linear(x, prepared, bias)
"""


def a_run(tmp_path: Path, changes: dict[str, object]) -> Path:
    """Two steps on a random model, with a reward that differs between its answers."""
    data = tmp_path / "train.parquet"
    rows = [row(f"t{3 + i} t{20 + i} t{40 + i}") for i in range(16)]
    pq.write_table(pa.Table.from_pylist(rows), data)
    (tmp_path / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return min(len(solution_str) / 64, 1.0)\n"
    )
    changes = {
        "rollout.n": 4,
        "trainer.val_before_train": "false",
        "actor.ppo_micro_batch_size_per_gpu": 4,
        "actor.log_prob_micro_batch_size_per_gpu": 8,
        "optim.lr": 1e-4,
        "reward.function": f"{tmp_path / 'reward.py'}:score",
        **changes,
    }
    run = run_quickstart(tmp_path, save_random_model(tmp_path / "model"), data, changes)
    steps = read_metrics(run)
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["actor/grad_norm"] > 0
        assert metrics["mismatch/abs_max"] == 0.0
    return run


@pytest.mark.slow
def test_qarls_own_kernel_is_on_both_sides(tmp_path: Path) -> None:
    """vLLM itself would compute W4A16, and δ would not be 0."""
    a_run(tmp_path, {"quant.scheme": "w4a8", "quant.kernels": "qarl"})


def test_own_parts_train_in_verl_without_a_mismatch(tmp_path: Path) -> None:
    marker = tmp_path / "kernel_ran"
    (tmp_path / "own_kernel.py").write_text(KERNEL.format(marker=marker))
    examples = [ROOT / f"examples/own_{part}.py" for part in ("scheme", "optimizer", "objective")]
    files = [*examples, tmp_path / "own_kernel.py"]
    changes = {
        "plugins": f"[{', '.join(map(str, files))}]",
        "quant.scheme": "w4a16_symmetric",
        "optim.name": "lion",
        "actor.loss": "cispo",
    }
    run = a_run(tmp_path, changes)
    assert marker.exists()
    packed = [tensor for name, tensor in read_tensors(run / "export") if "weight_packed" in name]
    codes = torch.cat([unpack_int4(tensor).flatten() for tensor in packed])
    assert (codes.min().item(), codes.max().item()) == (-7, 7)
