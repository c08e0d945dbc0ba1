"""A model of a public shape with random weights, and prompts for it: whole runs at real sizes without a download.

    python scripts/random_model.py --model Qwen3-0.6B --output runs/gpu_check/Qwen3-0.6B
    python scripts/random_model.py --model Qwen3-8B --layers 4 --output runs/gpu_check/Qwen3-8B-4-layers

The output has `model` (weights as transformers initialises them, and a tokenizer with a word for each token) and
`prompts.jsonl`. Random weights hardly ever sample the end of a response, so each response has the longest length that
the run allows. `reward` depends on the response alone. On a GPU the weights are drawn there: the 30B takes some minutes
on a CPU. An output that is complete stays as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qarl.bench.model import SPECIAL, Source, find_model, write_model

PROMPTS = 512
WORDS = 16


def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return the share of words with an even number. It differs between random responses, so there is a gradient."""
    words = re.findall(r"\d+", solution_str)
    return sum(int(word) % 2 == 0 for word in words) / max(len(words), 1)


def write_prompts(file: Path, vocabulary: int) -> None:
    numbers = torch.randint(
        len(SPECIAL), vocabulary, (PROMPTS, WORDS), generator=torch.Generator().manual_seed(0)
    )
    rows = [
        {
            "data_source": "random",
            "prompt": [{"role": "user", "content": " ".join(f"t{n}" for n in row)}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for row in numbers.tolist()
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        required=True,
        help="a name from qarl/bench/models, or a folder with a config.json",
    )
    parser.add_argument("--layers", type=int, help="only the first so many; all by default")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    prompts = args.output / "prompts.jsonl"
    if not prompts.is_file():  # it is written last
        shutil.rmtree(args.output, ignore_errors=True)
        config = dict(find_model(args.model).config) | {"bos_token_id": None, "pad_token_id": 2}
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            write_model(
                Source(args.model, config),
                args.layers or config["num_hidden_layers"],
                args.output / "model",
                eos=1,
            )
        staged = prompts.with_suffix(".new")
        write_prompts(staged, config["vocab_size"])
        staged.rename(prompts)
    print(f"{args.model} with random weights: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
