"""Where the trainer at level `model` first leaves the engine: the layer, its module and the element.

    python scripts/difference_origin.py --scheme w4a16 --batches 8

Samples batches of the quickstart, and looks for tokens with δ other than 0 at `model`. The level `exact`, whose δ is 0,
stands for the engine: for each such token the attention of both levels is compared, layer by layer. The first layer
with equal queries, keys and values and another output is where they part. Printed are the two BF16 outputs, PyTorch's
FP32 value before it is rounded, and the value in float64.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from qarl.align import cpu as attention
from qarl.config import load_config
from qarl.diagnose.diagnosis import with_quant
from qarl.trainer.batch import Batch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.setup import prepare_run

KEYS = ("quant.align=model", "rollout.cpu_kvcache_space_gib=0.25", "trainer.val_max_prompts=8")


def recorded(function: Callable[..., Any], calls: list[dict[str, Any]]) -> Callable[..., Any]:
    def call(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        output = function(module, query, key, value, *rest, **more)
        calls.append({"q": query, "k": key, "v": value, "out": output[0], "scaling": more["scaling"]})
        return output

    return call


@torch.no_grad()
def attention_calls(policy: Policy, batch: Batch, row: int) -> list[dict[str, Any]]:
    """The inputs and the output of each layer's attention for one row."""
    name, function = {
        "model": (attention.FP32_ATTENTION, attention.fp32_attention),
        "exact": (attention.ENGINE_ATTENTION, attention.engine_attention),
    }[policy.align]
    calls: list[dict[str, Any]] = []
    AttentionInterface.register(name, recorded(function, calls))
    try:
        policy.response_log_probs(batch, torch.tensor([row]), temperature=1.0)
    finally:
        AttentionInterface.register(name, function)
    return calls


def parting(ours: list[dict[str, Any]], engines: list[dict[str, Any]]) -> dict[str, Any]:
    """The first layer whose attention has equal inputs and another output."""
    for layer, (one, other) in enumerate(zip(ours, engines, strict=True)):
        differ = (one["out"] != other["out"]).nonzero()
        if not len(differ):
            continue
        if not all(torch.equal(one[name], other[name]) for name in "qkv"):
            return {"layer": layer, "found": "the inputs of attention differ"}
        _, token, head, element = place = tuple(differ[0].tolist())
        q, k, v = (one[name].bfloat16() for name in "qkv")
        groups = q.shape[1] // k.shape[1]
        found: dict[str, Any] = {"layer": layer, "found": "attention", "place": place, "elements": len(differ)}
        found |= {"model": float(one["out"][place]), "engine": float(other["out"][place])}
        for name, dtype in (("fp32", torch.float32), ("float64", torch.float64)):
            value = F.scaled_dot_product_attention(
                q.to(dtype) * one["scaling"],
                k.to(dtype).repeat_interleave(groups, 1),
                v.to(dtype).repeat_interleave(groups, 1),
                is_causal=True,
                scale=1.0,
            )
            found[name] = float(value[0, head, token, element])
        return found
    return {"found": "nothing"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--batches", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(["config=quickstart.yaml", f"output_dir={folder}", f"quant.scheme={args.scheme}", *KEYS])
        trainer = LocalTrainer(config, prepare_run(config))
        with trainer.engine:
            trainer.publish()
            batches = [trainer.rollout()[0] for _ in range(args.batches)]
        exact = Policy.load(with_quant(config, align="exact"))
        tokens = 0
        for number, batch in enumerate(batches):
            tokens += int(batch.response_mask.sum())
            own = trainer.old_log_probs(batch)
            for row, token in ((own != batch.rollout_log_probs) & batch.response_mask).nonzero().tolist():
                delta = float(own[row, token] - batch.rollout_log_probs[row, token])
                found = parting(attention_calls(trainer.policy, batch, row), attention_calls(exact, batch, row))
                print(json.dumps({"batch": number, "row": row, "token": token, "delta": delta} | found), flush=True)
        print(f"{tokens} tokens in {len(batches)} batches")


if __name__ == "__main__":
    main()
