"""A model of a public shape with random weights, and prompts for it: whole runs at real sizes without a download.

    python scripts/random_model.py --model Qwen3-0.6B --output runs/gpu_check/Qwen3-0.6B

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

from qarl.bench.arguments import find_model

PROMPTS, WORDS = 512, 16
SPECIAL = ("<unknown>", "<end>", "<padding>")
"""The first words. None is the beginning of another: a tokenizer cuts special tokens out of the middle of words."""


def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return the share of words with an even number. It differs between random responses, so there is a gradient."""
    words = re.findall(r"\d+", solution_str)
    return sum(int(word) % 2 == 0 for word in words) / max(len(words), 1)


def make_model(name: str, folder: Path) -> int:
    """Write a Hugging Face folder. Return the number of tokens of its vocabulary."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    given = dict(find_model(name).config) | {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 2}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**given)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    vocabulary = int(config.vocab_size)
    named = {**{name: i for i, name in enumerate(SPECIAL)}, **{f"t{i}": i for i in range(len(SPECIAL), vocabulary)}}
    words = Tokenizer(models.WordLevel(named, unk_token=SPECIAL[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    unknown, end, padding = SPECIAL
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=end, pad_token=padding, unk_token=unknown
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return vocabulary


def write_prompts(file: Path, vocabulary: int) -> None:
    numbers = torch.randint(len(SPECIAL), vocabulary, (PROMPTS, WORDS), generator=torch.Generator().manual_seed(0))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a name from qarl/bench/models, or a folder with a config.json")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    prompts = args.output / "prompts.jsonl"
    if not prompts.is_file():  # it is written last
        shutil.rmtree(args.output, ignore_errors=True)
        (args.output / "model").mkdir(parents=True)
        vocabulary = make_model(args.model, args.output / "model")
        staged = prompts.with_suffix(".new")
        write_prompts(staged, vocabulary)
        staged.rename(prompts)
    print(f"{args.model} with random weights: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
