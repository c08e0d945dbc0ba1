"""Step time with `actor.old_log_probs=auto` at level `model`, against level `off`.

    python scripts/old_log_probs_cost.py --schemes bf16 w8a8 w4a16 fp8
    python scripts/old_log_probs_cost.py --schemes bf16 w8a8 --random SmolLM2-135M --rounds 3

The variants of a scheme are trainers with one engine, and take their steps in turn. Each starts from the same weights
and asks for the same prompts with the same seeds, so the same level must give the same rewards. A cell is CPU seconds
of the process, of all its threads: on a machine that does other work too, wall-clock seconds say nothing. The first two
rounds are not counted: one warms up, and in the first step of a run `auto` recomputes. Cells are medians; ratios are
medians of the ratios of a round.

`--random NAME`: a model of that public shape with random weights, 2 prompts of 32 random tokens, 4 responses of 64
tokens each, two mini-batches, unless `--set` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qarl.bench.sources import find_model, write_model
from qarl.bench.workload import PAD, random_reward, random_tokens
from qarl.checks.model_folder import load_tokenizer
from qarl.config import Config, load_config
from qarl.data import Prompt, PromptDataset, PromptSampler
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.setup import RunParts, prepare_run

VARIANTS = {
    "off, recompute": ("off", "recompute"),
    "off, rollout": ("off", "rollout"),
    "model, recompute": ("model", "recompute"),
    "model, auto": ("model", "auto"),
}
BEFORE = ("off, recompute", "off, rollout", "model, recompute")
UNCOUNTED = 2


def configs(args: argparse.Namespace, scheme: str, folder: str) -> dict[str, Config]:
    """The config of each variant."""
    found = {}
    chosen = random_keys(Path(folder) / "model") if args.random else []
    given = {key.partition("=")[0] for key in args.set}
    for name, (level, source) in VARIANTS.items():
        overrides = [
            f"output_dir={folder}",
            f"name={name.replace(', ', '-')}",
            f"quant.scheme={scheme}",
            f"quant.align={level}",
            f"actor.old_log_probs={source}",
            "trainer.val_before_train=false",
            "actor.loss=grpo",  # with TBPO the rollout's log-probs are refused
            *(key for key in chosen if key.partition("=")[0] not in given),
            *args.set,
        ]
        found[name] = load_config([f"config={args.config}", *overrides])
    return found


def trainers(args: argparse.Namespace, scheme: str, folder: str) -> dict[str, LocalTrainer]:
    """A trainer for each variant, all with the engine of the first."""
    found: dict[str, LocalTrainer] = {}
    for name, config in configs(args, scheme, folder).items():
        engine = next(iter(found.values())).engine if found else None
        parts = random_parts(config) if args.random else prepare_run(config)
        found[name] = LocalTrainer(config, parts, engine)
    return found


def random_keys(model: Path) -> list[str]:
    """Overrides for a run of `--random`."""
    return [
        f"model.path={model}",
        "data.train_batch_size=2",
        "data.max_response_length=64",
        "rollout.n=4",
        "actor.ppo_mini_batch_size=1",
        "actor.ppo_micro_batch_size_per_gpu=4",
        "actor.log_prob_micro_batch_size_per_gpu=4",
        "optim.lr=1e-6",
    ]


def random_parts(config: Config) -> RunParts:
    """The policy and random prompts. The reward is 0 or 1 by the text."""
    tokenizer, hf_config = load_tokenizer(config.model.path)
    count = config.data.train_batch_size
    rows = random_tokens(hf_config.vocab_size, count, config.data.max_prompt_length)
    prompts = PromptDataset([Prompt(i, "random", [], ids, "") for i, ids in enumerate(rows)])
    sampler = PromptSampler(count, count, seed=0, shuffle=False)
    return RunParts(Policy.load(config), tokenizer, PAD, prompts, [], sampler, random_reward)


def measure(args: argparse.Namespace, scheme: str, folder: str) -> dict[str, list[dict[str, Any]]]:
    """Variant -> CPU seconds and metrics of each step."""
    made = trainers(args, scheme, folder)
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in made}
    with next(iter(made.values())).engine:
        for _ in range(UNCOUNTED + args.rounds):
            for name, trainer in made.items():
                trainer.publish()
                trainer.timer.pop()
                start = time.process_time()
                metrics = trainer.train_step()
                seconds = time.process_time() - start
                steps[name].append({"cpu_s": seconds, **metrics, **trainer.timer.pop()})
    return steps


def summary(steps: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of the counted steps, ratios of `model, auto`, and whether its training is that of `model, recompute`."""
    counted = {name: [step["cpu_s"] for step in found[UNCOUNTED:]] for name, found in steps.items()}
    auto = counted["model, auto"]
    ratios = {name: statistics.median(a / b for a, b in zip(auto, counted[name], strict=True)) for name in BEFORE}
    same = ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "response_length/mean")
    return {
        "cpu_s": {name: statistics.median(values) for name, values in counted.items()},
        "auto_relative_to": ratios,
        "same_training": all(
            a[name] == b[name]
            for a, b in zip(steps["model, auto"], steps["model, recompute"], strict=True)
            for name in same
        ),
        "recomputed": [step["old_log_probs/recomputed"] for step in steps["model, auto"]],
        "fallbacks": sum(step["old_log_probs/fallback"] for step in steps["model, auto"]),
        "largest_delta": {name: max(step["mismatch/abs_max"] for step in found) for name, found in steps.items()},
        "response_length": statistics.mean(step["response_length/mean"] for step in steps["model, auto"]),
        "reward": {name: statistics.mean(step["critic/score/mean"] for step in found) for name, found in steps.items()},
        "phases_wall_s": {
            name: {
                key.removeprefix("timing_s/"): statistics.median(step[key] for step in found[UNCOUNTED:])
                for key in found[-1]
                if key.startswith("timing_s/")
            }
            for name, found in steps.items()
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=["bf16", "w8a8", "w4a16", "fp8"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--config", default="quickstart.yaml")
    parser.add_argument("--random", help="a model of qarl/bench/models, with random weights")
    parser.add_argument("--set", nargs="*", default=[], help="overrides, key=value")
    parser.add_argument("--output", type=Path, help="JSON to write")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = {}
    lines = ["| scheme | " + " | ".join(VARIANTS) + " | " + " | ".join(f"auto / {name}" for name in BEFORE) + " |"]
    lines.append("|---" * (1 + len(VARIANTS) + len(BEFORE)) + "|")
    for scheme in args.schemes:
        with tempfile.TemporaryDirectory() as folder:
            if args.random:
                source = find_model(args.random)
                write_model(source, source.layers, Path(folder) / "model")
            found[scheme] = one = summary(measure(args, scheme, folder))
        cells = [f"{one['cpu_s'][name]:.2f}" for name in VARIANTS]
        cells += [f"{one['auto_relative_to'][name]:.2f}" for name in BEFORE]
        lines.append(f"| {scheme} | " + " | ".join(cells) + " |")
        print(json.dumps({scheme: one}), flush=True)
    print("\n".join(lines))
    if args.output is not None:
        args.output.write_text(json.dumps({"rounds": args.rounds, "set": args.set, "schemes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
