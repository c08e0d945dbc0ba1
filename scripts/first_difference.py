"""Up to which length the trainer at a level has the rollout's log-probs in every bit: how far `auto` can skip.

    python scripts/first_difference.py --tokens 1000 --responses 96

The quickstart's model, its positions extended, continues past its end-of-text. For each response the place of the
first token with δ other than 0 is noted. Cells: share of the responses without a difference in their first T tokens.
`actor.old_log_probs=auto` skips its pass while no response of a batch has a difference.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from long_responses import extended, load, sample

LENGTHS = (25, 50, 75, 100, 150, 200, 300, 500, 1000)


@torch.no_grad()
def first_differences(folder: Path, scheme: str, level: str, responses: int, tokens: int) -> list[int]:
    """For each response the number of tokens before the first one with δ != 0; `tokens` if there is none."""
    batch, _ = sample(folder, scheme, responses, tokens)
    policy = load(folder, scheme, level)
    parts = [policy.response_log_probs(batch, rows, temperature=1.0) for rows in batch.micro_batches(4)]
    differ = (torch.cat(parts) != batch.rollout_log_probs) & batch.response_mask
    first = torch.where(differ.any(1), differ.int().argmax(1), batch.response_mask.sum(1))
    return [int(place) for place in first]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny-qwen3")
    parser.add_argument("--schemes", nargs="+", default=["bf16", "w4a16", "w8a8", "fp8"])
    parser.add_argument("--levels", nargs="+", default=["model"])
    parser.add_argument("--responses", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--output", type=Path, help="JSON to write")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    lengths = [length for length in LENGTHS if length <= args.tokens]
    print(f"| scheme, level | earliest | {' | '.join(map(str, lengths))} |")
    print("|---" * (len(lengths) + 2) + "|")
    found: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as parent:
        folder = extended(args.model, Path(parent) / "model", args.tokens + 64)
        for scheme in args.schemes:
            for level in args.levels:
                places = first_differences(folder, scheme, level, args.responses, args.tokens)
                found[f"{scheme}, {level}"] = places
                shares = [sum(place >= length for place in places) / len(places) for length in lengths]
                cells = [f"{scheme}, `{level}`", str(min(places)), *(f"{share:.0%}" for share in shares)]
                print("| " + " | ".join(cells) + " |", flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps({"tokens": args.tokens, "equal_tokens": found}) + "\n")


if __name__ == "__main__":
    main()
