"""One training step of the local backend under torch.profiler, with a table of its kernels and a trace.

    python scripts/profile_step.py --trace trace.json config=quickstart.yaml KEY=VALUE ...

All steps but the last of `trainer.total_training_steps` warm up. Three things that make a step slow are seen at a
glance: kernels that take long, kernels that are many (the column of calls), and copies between host and device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from qarl.config import load_config
from qarl.trainer.local import LocalTrainer
from qarl.trainer.prepare import prepare_run

ROWS = 40


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trace", type=Path, required=True, help="the file for Perfetto; it is compressed to .gz"
    )
    args, overrides = parser.parse_known_args(argv)
    config = load_config(overrides)
    trainer = LocalTrainer(config, prepare_run(config))
    cuda = torch.cuda.is_available()
    with trainer.engine:
        trainer.publish()
        for _ in range(config.trainer.total_training_steps - 1):
            trainer.train_step()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with profile(activities=activities) as profiler:
            trainer.train_step()
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=60))
    args.trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(f"{args.trace}.gz")
    print(f"trace: {args.trace}.gz")
    return 0


if __name__ == "__main__":
    sys.exit(main())
