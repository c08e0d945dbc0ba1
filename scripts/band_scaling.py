"""Whether one setting of TBPO's bands serves every response length: shares outside, fixed and scaled by length.

    python scripts/band_scaling.py --output benchmarks/results/band_scaling_cpu.json

A small model learns the characters of this repository's docs, so that text of any length is its own. Then, for each
length and several seeds, it samples responses of that length, makes one AdamW update with half of them and advantages
of both signs, and compares the log-probs of the other half before and after: the second mini-batch of a step. The bands
are chosen once, so that 5% are outside at the reference length, and used for every length.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from qarl.checkpoint.json_file import write_json
from qarl.process import package_versions
from qarl.tbpo import TBPOConfig, reduce_metrics, tbpo_loss

CONTEXT, PROMPT = 512, 16
LENGTHS = (20, 50, 400)


def text() -> torch.Tensor:
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    return torch.tensor(list("".join(page.read_text(encoding="utf-8") for page in pages).encode("ascii", "replace")))


def trained(data: torch.Tensor, steps: int) -> PreTrainedModel:
    """Return a model of 128 characters after `steps` updates on random pieces of `data`."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 24}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=128, max_position_embeddings=CONTEXT, **sizes, **heads))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        starts = torch.randint(len(data) - CONTEXT, (8,))
        rows = torch.stack([data[start : start + CONTEXT] for start in starts.tolist()])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: {loss.item():.2f} nats per character", flush=True)
    return model


@torch.no_grad()
def sample(model: PreTrainedModel, data: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Return [count, PROMPT + length]: pieces of the text, continued by the model at temperature 1."""
    starts = torch.randint(len(data) - PROMPT, (count,)).tolist()
    rows = torch.stack([data[start : start + PROMPT] for start in starts])
    found = model(input_ids=rows, use_cache=True)
    for _ in range(length):
        chosen = torch.multinomial(found.logits[:, -1].softmax(-1), 1)
        rows = torch.cat([rows, chosen], dim=1)
        found = model(input_ids=chosen, past_key_values=found.past_key_values, use_cache=True)
    return rows


def log_probs(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(2, rows[:, PROMPT:, None])[:, :, 0]


def second_mini_batch(
    start: PreTrainedModel, data: torch.Tensor, count: int, length: int, lr: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return old and new log-probs, [count, length] each, of responses that an update on `count` others has moved."""
    model = copy.deepcopy(start)
    rows = sample(model, data, 2 * count, length)
    first, second = rows[:count], rows[count:]
    # Steps before this one have filled AdamW's second moment, so its first update is not sign(gradient).
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.0, 0.9), weight_decay=0.0)
    advantages = torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0)
    with torch.no_grad():
        old = log_probs(model, second)
        old_first = log_probs(model, first)
    loss, _ = tbpo_loss(
        log_probs(model, first), old_first, old_first, advantages, torch.ones_like(old_first), TBPOConfig()
    )
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        return old, log_probs(model, second)


def outside(old: torch.Tensor, new: torch.Tensor, **bands: Any) -> dict[str, float]:
    """Return TBPO's metrics of negative responses, whose band has two edges."""
    _, statistics = tbpo_loss(new, old, old, -torch.ones(len(old)), torch.ones_like(old), TBPOConfig(**bands))
    return reduce_metrics([statistics])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--reference", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--responses", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--pretraining", type=int, default=600)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    start = time.perf_counter()
    data = text()
    model = trained(data, options.pretraining)
    pairs: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for length in sorted({*options.lengths, options.reference}):
        torch.manual_seed(length)
        pairs[length] = [
            second_mini_batch(model, data, options.responses, length, options.lr) for _ in range(options.seeds)
        ]
    joined = {length: [torch.cat(parts) for parts in zip(*found, strict=True)] for length, found in pairs.items()}
    reference = outside(*joined[options.reference], band_reference_length=options.reference)["actor/band_p95"]
    bands = {"neg_seq_clip_ratio_low": reference, "neg_seq_clip_ratio_high": reference}
    rows = []
    print(f"bands of {reference:.2g}, given at {options.reference} tokens")
    print("| tokens | 95% of \\|r - 1\\| | times sqrt(tokens) | mean log r | outside, fixed | outside, scaled |")
    print("|---|---|---|---|---|---|")
    for length in options.lengths:
        old, new = joined[length]
        fixed = outside(old, new, **bands)
        scaled = outside(old, new, **bands, band_scaling="length", band_reference_length=options.reference)
        own = outside(old, new, band_reference_length=length)["actor/band_p95"]
        rows.append(
            {
                "tokens": length,
                "responses": len(old),
                "band_p95": own,
                "band_p95_times_sqrt_tokens": own * length**0.5,
                "mean_log_ratio": float((new - old).double().mean()),
                "token_log_ratio_std": float((new - old).double().std()),
                "outside_none": fixed["actor/neg_outside_band_frac"],
                "outside_length": scaled["actor/neg_outside_band_frac"],
            }
        )
        one = rows[-1]
        print(
            f"| {length} | {own:.2e} | {one['band_p95_times_sqrt_tokens']:.3f} | {one['mean_log_ratio']:.1e} | "
            f"{one['outside_none']:.1%} | {one['outside_length']:.1%} |",
            flush=True,
        )
    if options.output:
        settings = {key: value for key, value in vars(options).items() if key != "output"}
        found = {"what": "scripts/band_scaling.py", "settings": settings, "versions": package_versions(["torch"])}
        write_json(
            options.output, found | {"band": reference, "minutes": (time.perf_counter() - start) / 60, "rows": rows}
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
