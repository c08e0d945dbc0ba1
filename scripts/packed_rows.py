"""Packed rows against padded rows: the same numbers, and what each costs.

    python scripts/packed_rows.py --output benchmarks/results/packed_rows_cpu.json

`equal`: random models, dense and a mixture of experts, in every scheme and at every level. Rows of 1 to 260 tokens are
packed, and padded to the longest row. Reported are the share of log-probs that differ in a bit, the losses, the share
of the per-token gradients that differ in a bit (those of the embeddings' output), and the largest relative difference,
in norm, of a weight's gradient. A weight's gradient is a sum over tokens in one BF16 product. Padding adds zeros to
this sum and so changes where it is cut into blocks; so this gradient has a bound and is not equal.

`seconds`: rows with responses of 50 to 1,000 tokens with mean 200, and as many rows of 200 tokens, on a random model of
SmolLM2-135M's widths with fewer layers. `log-probs` is the pass for the old log-probs. `update` is forward and backward
of a mini-batch. The table gives microseconds of CPU time per real token, on one thread, the least of three rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from qarl.kernels.cpu import layer_ops
from qarl.quant import get_scheme
from qarl.rollout.engine import RolloutBatch
from qarl.tbpo import TBPOConfig, tbpo_loss
from qarl.trainer.batch import Batch, Rows, make_batch
from qarl.trainer.packing import micro_batches
from qarl.trainer.policy import Policy

LEVELS, SCHEMES = ("off", "linears", "model", "exact"), ("w4a16", "w8a8", "fp8", "bf16")
ROWS = [(3, 40), (9, 1), (1, 7), (30, 230), (5, 0), (12, 33), (2, 64), (4, 90), (6, 200), (8, 120)]
"""Tokens of prompt and response."""
PASSES = ("log-probs", "update")
PROMPT, SHORTEST, LONGEST, MEAN = 32, 50, 1000, 200


def random_model(family: str, **sizes: Any) -> Any:
    import transformers

    given: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
    }
    kinds = {
        "dense": transformers.Qwen3Config,
        "experts": transformers.Qwen3MoeConfig,
        "llama": transformers.LlamaConfig,
    }
    if family == "experts":
        given |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        kinds[family](**given | sizes), dtype=torch.bfloat16, attn_implementation="sdpa"
    )


def make_policy(family: str, scheme: str, level: str, *, packed: bool, **sizes: Any) -> Policy:
    model = random_model(family, **sizes)
    policy = Policy(model, get_scheme(scheme, group_size=32), ("lm_head",), align=level, packed=packed)
    assert policy.align == level, policy.report
    return policy


def random_batch(rows: Sequence[tuple[int, int]], vocabulary: int) -> Batch:
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=generator).tolist()

    prompts, responses = [tokens(prompt) for prompt, _ in rows], [tokens(response) for _, response in rows]
    log_probs = [[-6.0] * len(row) for row in responses]
    rollout = RolloutBatch(prompts, responses, log_probs, ["stop"] * len(rows), weight_version=0)
    advantages = torch.tensor([1.0, -0.5] * len(rows))[: len(rows)]
    return make_batch(rollout, torch.zeros(len(rows)), advantages, pad_token_id=0)


@torch.no_grad()
def log_probs_of(policy: Policy, batch: Batch, parts: Sequence[Rows]) -> torch.Tensor:
    found = torch.zeros_like(batch.rollout_log_probs)
    for rows in parts:
        found[rows] = policy.response_log_probs(batch, rows, temperature=1.0)
    return found


def backward(policy: Policy, batch: Batch, old: torch.Tensor, parts: Sequence[Rows]) -> float:
    """Forward and backward of one mini-batch. Return its loss."""
    total, responses = 0.0, int(batch.response_mask.any(1).sum())
    for rows in parts:
        loss, _ = tbpo_loss(
            policy.response_log_probs(batch, rows, temperature=1.0),
            old[rows],
            batch.rollout_log_probs[rows],
            batch.advantages[rows],
            batch.response_mask[rows],
            TBPOConfig(seq_tis_imp_ratio_cap=100.0),
            global_batch_size=responses,
        )
        loss.backward()
        total += loss.item()
    return total


def measured(policy: Policy, batch: Batch) -> dict[str, Any]:
    """Log-probs, loss and gradients with all rows in one micro-batch. Token gradients are by row, without padding."""
    everything: list[Rows] = [slice(0, len(batch))]
    old = log_probs_of(policy, batch, everything)
    kept: list[torch.Tensor] = []
    embedding = policy.model.get_input_embeddings()

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(kept.append)

    handle = embedding.register_forward_hook(keep)
    loss = backward(policy, batch, old, everything)
    handle.remove()
    flat = kept[0].flatten(0, 1)
    lengths, width = batch.lengths.tolist(), kept[0].shape[1]
    starts = [sum(lengths[:i]) if policy.packed else i * width for i in range(len(lengths))]
    tokens = torch.cat([flat[start : start + length] for start, length in zip(starts, lengths, strict=True)])
    gradients = {name: p.grad.float() for name, p in policy.model.named_parameters() if p.grad is not None}
    return {"log_probs": old[batch.response_mask], "loss": loss, "tokens": tokens, "gradients": gradients}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    norms = {name: float(gradient.norm()) for name, gradient in other.items()}
    return max(float((one[name] - other[name]).norm()) / norm for name, norm in norms.items() if norm > 1e-6)


def compare(family: str, scheme: str, level: str) -> dict[str, Any]:
    batch = random_batch(ROWS, 512)
    packed, padded = (
        measured(make_policy(family, scheme, level, packed=one, tie_word_embeddings=False), batch)
        for one in (True, False)
    )
    return {
        "log-probs that differ": float((packed["log_probs"] != padded["log_probs"]).float().mean()),
        "loss packed": packed["loss"],
        "loss padded": padded["loss"],
        "token gradients that differ": float((packed["tokens"] != padded["tokens"]).float().mean()),
        "weight gradients, relative difference": distance(packed["gradients"], padded["gradients"]),
    }


def uneven_lengths(count: int) -> list[int]:
    """`count` lengths of 50 to 1,000 with mean 200: many short responses and few long ones."""
    chosen = random.Random(0)
    lengths = [min(LONGEST, max(SHORTEST, round(chosen.lognormvariate(4.97, 0.75)))) for _ in range(count)]
    lengths[0], lengths[1] = SHORTEST, LONGEST
    while sum(lengths) != MEAN * count:
        i = chosen.randrange(2, count)
        lengths[i] = min(LONGEST, max(SHORTEST, lengths[i] + (1 if sum(lengths) < MEAN * count else -1)))
    return lengths


@dataclass
class Case:
    """Rows, their micro-batches and a policy, with the least CPU seconds so far of each pass."""

    policy: Policy
    batch: Batch
    parts: Sequence[Rows]
    log_probs: float = float("inf")
    update: float = float("inf")

    def round(self) -> None:
        start = time.process_time()
        old = log_probs_of(self.policy, self.batch, self.parts)
        middle = time.process_time()
        self.policy.model.zero_grad()
        backward(self.policy, self.batch, old, self.parts)
        self.log_probs = min(self.log_probs, middle - start)
        self.update = min(self.update, time.process_time() - middle)

    def per_token(self) -> dict[str, float]:
        tokens = int(self.batch.lengths.sum())
        return {"log-probs": 1e6 * self.log_probs / tokens, "update": 1e6 * self.update / tokens}


def timed(args: argparse.Namespace, level: str) -> dict[str, Any]:
    sizes = {
        "vocab_size": 4096,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "initializer_range": 0.04,
        "tie_word_embeddings": True,
    }
    actor: Any = SimpleNamespace(
        use_dynamic_bsz=True, ppo_max_token_len_per_gpu=args.tokens, log_prob_max_token_len_per_gpu=None
    )
    by_rows = [slice(start, start + 8) for start in range(0, args.responses, 8)]
    uneven, equal = uneven_lengths(args.responses), [MEAN] * args.responses
    cases = {}
    for name, lengths, packed in (("equal", equal, True), ("packed", uneven, True), ("padded", uneven, False)):
        batch = random_batch([(PROMPT, length) for length in lengths], sizes["vocab_size"])
        policy = make_policy("llama", "w4a16", level, packed=packed, **sizes)
        cases[name] = Case(policy, batch, micro_batches(batch, actor) if packed else by_rows)
    for round_ in range(args.rounds):
        for name, case in cases.items():
            if name != "padded" or not round_:
                case.round()
    per_token = {name: case.per_token() for name, case in cases.items()}
    found: dict[str, Any] = {"micro-batches": {name: len(case.parts) for name, case in cases.items()}}
    found["us per token"] = per_token
    for name in ("packed", "padded"):
        found[f"{name} over equal"] = {what: per_token[name][what] / per_token["equal"][what] for what in PASSES}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["equal", "seconds"], choices=["equal", "seconds"])
    parser.add_argument("--levels", nargs="+", default=["linears", "model"], help="levels that are timed")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--responses", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048, help="limit of a packed micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    if args.output is not None and args.output.exists():
        results = json.loads(args.output.read_text())
    amx = layer_ops.uses_tiles("cpu", 32)
    results["machine"] = {"torch": torch.__version__, "threads": 1, "amx": amx}
    if "equal" in args.parts:
        results["equal"] = {}
        for family in ("dense", "experts"):
            for scheme in SCHEMES:
                for level in LEVELS:
                    found = compare(family, scheme, level)
                    results["equal"][f"{family} {scheme} {level}"] = found
                    print(family, scheme, level, found, flush=True)
    if "seconds" in args.parts:
        lengths = sorted(uneven_lengths(args.responses))
        results["seconds"] = {"layers": args.layers, "tokens": args.tokens, "responses": lengths}
        for level in args.levels:
            results["seconds"][level] = timed(args, level)
            print(
                level, json.dumps({k: v for k, v in results["seconds"][level].items() if k != "responses"}), flush=True
            )
    if args.output is not None:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
