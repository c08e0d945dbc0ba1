"""A hundred publishes in a row, each compared with a freshly started vLLM: tokens, log-probs, memory and pointers.

    python scripts/publish_stress.py --schemes w4a16 w8a8 fp8 bf16 --publishes 100

For each scheme a few sets of weights (the tiny model, with noise on top) are exported, and each is loaded once by a
vLLM in a separate process that knows nothing of QaRL; what it generates greedily is the reference. Then one engine is
published to again and again, with the sets in random order, and after every publish what it generates must equal the
reference of that set bit for bit. Exit code 1 if it does not, or if memory grows or a tensor moves.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qarl.checkpoint.compressed_tensors import ModelFiles, save_model
from qarl.quant import get_scheme, packed_state_dict
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig

MAX_TOKENS = 24
MAX_MODEL_LEN = 64
PROMPTS = [[3 + i % 17, 5 + i % 11, 8 + i % 13, 4 + i % 29, 3] for i in range(64)]
IGNORE = ("lm_head",)
GROWTH_MB = 32  # of the high-water mark between the tenth publish and the last

FRESH_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
folder, prompts, max_tokens, max_model_len = json.loads(sys.argv[1])
llm = LLM(model=folder, max_model_len=max_model_len, enforce_eager=True, kv_cache_memory_bytes=2**28)
params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True)
outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
done = [output.outputs[0] for output in outputs]
tokens = [list(c.token_ids) for c in done]
print("RESULT" + json.dumps([tokens, [[p[t].logprob for t, p in zip(c.token_ids, c.logprobs)] for c in done]]))
"""

Generated = tuple[list[list[int]], list[list[float]]]


def fresh(folder: Path) -> Generated:
    """The text that a fresh vLLM generates from `folder`."""
    command = [sys.executable, "-c", FRESH_VLLM, json.dumps([str(folder), PROMPTS, MAX_TOKENS, MAX_MODEL_LEN])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    line = next((line for line in run.stdout.splitlines() if line.startswith("RESULT")), None)
    if line is None:
        raise RuntimeError(f"the fresh vLLM failed:\n{run.stderr[-3000:]}")
    tokens, log_probs = json.loads(line.removeprefix("RESULT"))
    return tokens, log_probs


def greedy(engine: RolloutEngine) -> Generated:
    batch = engine.generate(PROMPTS, SamplingConfig(MAX_TOKENS, temperature=0.0, ignore_eos=True))
    return batch.response_token_ids, batch.rollout_log_probs


def weight_sets(model_folder: str, scheme_name: str, group_size: int, sets: int, out: Path) -> tuple[list, list]:
    """The tensors of each set, and what a fresh vLLM generates from it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scheme = get_scheme(scheme_name, group_size=group_size)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tensors, references = [], []
    for number in range(sets):
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02 * number)
        packed = [(name, t.clone()) for name, t in packed_state_dict(model, scheme=scheme, ignore=IGNORE)]
        folder = save_model(
            out / f"{scheme_name}-{number}", ModelFiles.of(model, tokenizer), packed, scheme=scheme, ignore=IGNORE
        )
        tensors.append(packed)
        references.append(fresh(folder))
    if len({json.dumps(reference) for reference in references}) != sets:
        raise RuntimeError("two sets of weights generate the same: the comparison would show nothing")
    return tensors, references


def stress(args: argparse.Namespace, scheme_name: str, out: Path) -> dict[str, Any]:
    tensors, references = weight_sets(args.model, scheme_name, args.group_size, args.sets, out)
    scheme = get_scheme(scheme_name, group_size=args.group_size)
    config = EngineConfig(args.model, scheme, IGNORE, max_model_len=MAX_MODEL_LEN, kv_cache_gib=0.25)
    order = random.Random(0)
    equal = moved = 0
    with RolloutEngine(config) as engine:
        for number in range(args.publishes):
            chosen = order.randrange(args.sets)
            engine.publish(tensors[chosen], version=number)
            equal += greedy(engine) == references[chosen]
            if number == min(9, args.publishes - 1):
                pointers = {name: p.data_ptr() for name, p in engine.model().named_parameters()}
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        moved = sum(p.data_ptr() != pointers[name] for name, p in engine.model().named_parameters())
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1e3
        back = []
        for chosen in (0, 1, 0):
            engine.publish(tensors[chosen], version=chosen)
            back.append(greedy(engine))
    return {
        "scheme": scheme_name,
        "publishes": args.publishes,
        "equal_to_a_fresh_engine": equal,
        "a_b_a_returns_to_a": back[0] == back[2] and back[0] != back[1],
        "tensors_moved": moved,
        "peak_memory_growth_mb": round(growth, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=["w4a16", "w8a8", "fp8", "bf16"])
    parser.add_argument("--publishes", type=int, default=100)
    parser.add_argument("--sets", type=int, default=4)
    parser.add_argument("--model", default="models/tiny-qwen3")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out:
        results = [stress(args, scheme, Path(out)) for scheme in args.schemes]
    for row in results:
        print(json.dumps(row))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    good = all(
        row["equal_to_a_fresh_engine"] == row["publishes"]
        and row["a_b_a_returns_to_a"]
        and not row["tensors_moved"]
        and row["peak_memory_growth_mb"] < GROWTH_MB
        for row in results
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
