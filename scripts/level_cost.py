"""The cost of each alignment level: the time of a training step of the quickstart, as a ratio to level `off`.

    python scripts/level_cost.py --schemes w4a16 w8a8 fp8 bf16

One process and one engine a scheme; the levels take steps in turn, so that a machine whose speed drifts slows all
alike. The first round warms up and is not counted. Cells are ratios of medians over the rounds: the whole step, and in
brackets old log-probs and update, the only phases a level changes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence

import torch

from qarl.config import Config, load_config
from qarl.diagnose.diagnosis import with_quant
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.setup import prepare_run

LEVELS = ("off", "linears", "model", "exact")


def measure(config: Config, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Level -> `timing_s/*` of each counted step."""
    trainer = LocalTrainer(config, prepare_run(config))
    policies = {level: Policy.load(with_quant(config, align=level)) for level in LEVELS}
    times: dict[str, list[dict[str, float]]] = {level: [] for level in LEVELS}
    with trainer.engine:
        for number in range(rounds + 1):
            for level, policy in policies.items():
                trainer.replace_policy(policy)
                trainer.publish()
                trainer.timer.pop()
                trainer.train_step()
                seconds = trainer.timer.pop()
                if number:
                    times[level].append(seconds)
    return times


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=["w4a16", "w8a8", "fp8", "bf16"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines = ["| scheme | `off`, s | " + " | ".join(f"`{level}`" for level in LEVELS[1:]) + " |"]
    lines.append("|---" * (len(LEVELS) + 1) + "|")
    for scheme in args.schemes:
        with tempfile.TemporaryDirectory() as folder:
            config = load_config(["config=quickstart.yaml", f"output_dir={folder}", f"quant.scheme={scheme}"])
            times = measure(config, args.rounds)
        step = {level: statistics.median(t["timing_s/step"] for t in times[level]) for level in LEVELS}
        part = {
            level: statistics.median(t["timing_s/old_log_prob"] + t["timing_s/update"] for t in times[level])
            for level in LEVELS
        }
        cells = [f"{step[level] / step['off']:.2f} ({part[level] / part['off']:.2f})" for level in LEVELS[1:]]
        lines.append(f"| {scheme} | {step['off']:.2f} ({part['off']:.2f}) | " + " | ".join(cells) + " |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
