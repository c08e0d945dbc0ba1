"""Makes tests/data/formats.tar.gz: checkpoints and exports of tiny runs, which every later version must load.

    PYTHONPATH=tests/support python -m stored_formats OUTPUT.tar.gz

It trains for two steps in each backend, with the QaRL that Python imports. The archive in the repository was made with
commit 4fc89e9, before checkpoints had a record of their inputs. Keep it as it is, and add another beside it when a
format changes: users have such files.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from checkout import ROOT
from random_models import save_random_model

ARCHIVE = ROOT / "tests" / "data" / "formats.tar.gz"
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
WORDS = 64
CONFIG = """\
model: {path: model}
data:
  train_files: [train.jsonl]
  val_files: [train.jsonl]
  train_batch_size: 4
  max_prompt_length: 16
  max_response_length: 16
reward: {function: "reward.py:score"}
rollout: {n: 2, cpu_kvcache_space_gib: 0.25}
quant: {scheme: w4a16, group_size: 32}
actor:
  ppo_mini_batch_size: 2
  ppo_micro_batch_size_per_gpu: 4
  log_prob_micro_batch_size_per_gpu: 8
optim: {lr: 1.0e-3}
trainer: {total_training_steps: 2, save_freq: 2, num_threads: 1, plots: false, report: false, val_before_train: false}
"""
REWARD = """\
def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 7)
"""
ROW = (
    '{{"data_source": "words", "prompt": [{{"role": "user", "content": "t3 t{0}"}}], '
    '"reward_model": {{"style": "rule", "ground_truth": "{0}"}}, "extra_info": {{"index": {0}}}}}\n'
)
RUNS = {
    "local": ["backend=local"],
    "local_adapter": ["backend=local", "lora.r=8"],
    "verl": ["backend=verl"],
}
"""Name of the run -> its overrides."""
_LEFT_OUT = {
    "versions.json",
    "samples.jsonl",
    "metrics.jsonl",
    "verl.jsonl",
    "verl.yaml",
    "tensorboard",
    ".lock",
}


def write_inputs(folder: Path) -> None:
    """Write the model, the data, the reward and the config of the runs to `folder`."""
    save_random_model(folder / "model", vocab_size=WORDS, tie=True, **SIZES)
    (folder / "train.jsonl").write_text("".join(ROW.format(number) for number in range(8)))
    (folder / "reward.py").write_text(REWARD)
    (folder / "run.yaml").write_text(CONFIG)


def unpack(folder: Path) -> None:
    """Unpack the archive of the repository to `folder`."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")


def main(output: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        for run, overrides in RUNS.items():
            command = [
                sys.executable,
                "-m",
                "qarl.train",
                "config=run.yaml",
                f"name={run}",
                *overrides,
            ]
            subprocess.run(command, cwd=folder, check=True)
            (folder / "runs" / run / "summary.json").unlink()
        for part in list(folder.rglob("*")):
            if part.name in _LEFT_OUT and part.exists():
                shutil.rmtree(part) if part.is_dir() else part.unlink()
        with tarfile.open(output, "w:gz") as archive:
            for part in sorted(folder.iterdir()):
                archive.add(part, part.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
