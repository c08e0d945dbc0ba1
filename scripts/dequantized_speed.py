"""`quant.kernels=dequantized` against `engine` in W4A16: CPU seconds and memory.

    python scripts/dequantized_speed.py --output benchmarks/results/dequantized_cpu.json

The model has the shape of SmolLM2-135M, with random weights and a vocabulary of 8192 tokens. Each launch is a process
with a trainer and an engine on one thread, and the two kinds of kernels take turns. A launch measures, after a first
round that is not counted: a publish (quantization included), a rollout, the pass for old log-probs, and a forward and
backward. Figures are medians over launches and rounds. CPU seconds of the process are measured, so that other programs
on the machine matter less. δ is that of the measured rollouts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

KERNELS = ("engine", "dequantized")
VOCABULARY, GROUP, PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8192, 64, 16, 32, 32


def make_model(folder: Path) -> None:
    from qarl.bench.sources import Source, find_model, write_model

    source = find_model("SmolLM2-135M")
    write_model(Source(source.name, {**source.config, "vocab_size": VOCABULARY}), source.layers, folder)


def one_round(
    engine: Any, policy: Any, prompts: list[list[int]], version: int, seconds: dict[str, list[float]]
) -> float:
    """Run and time each part once, and append its CPU seconds to `seconds`. Return the largest |δ|."""
    import torch

    from qarl.quant.convert import invalidate_quantized
    from qarl.rollout.engine import SamplingConfig
    from qarl.trainer.batch import make_batch

    def timed(what: str, call: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = call()
        seconds.setdefault(what, []).append(time.process_time() - start)
        return result

    invalidate_quantized(policy.model)
    timed("publish", lambda: engine.publish(policy.packed_state_dict(), version=version))
    sampling = SamplingConfig(NEW_TOKENS, ignore_eos=True)
    rollout = timed("rollout", lambda: engine.generate(prompts, sampling, list(range(PROMPTS))))
    nothing = torch.zeros(PROMPTS)
    batch = make_batch(rollout, nothing, nothing, pad_token_id=0)
    rows = slice(0, PROMPTS)
    with torch.no_grad():
        found = timed("old log-probs", lambda: policy.response_log_probs(batch, rows, temperature=1.0))
    timed("update", lambda: policy.response_log_probs(batch, rows, temperature=1.0).sum().backward())
    policy.model.zero_grad()
    return float((found - batch.rollout_log_probs).abs().max())


def launch(kernels: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure one kind of kernels in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    from qarl.quant.linear import QuantLinear
    from qarl.quant.scheme import get_scheme
    from qarl.rollout.engine import EngineConfig, RolloutEngine
    from qarl.trainer.policy import Policy

    scheme, ignore = get_scheme("w4a16", GROUP), ("lm_head",)
    length = PROMPT_TOKENS + NEW_TOKENS
    settings = EngineConfig(str(folder), scheme, ignore, length, kv_cache_gib=0.5, kernels=kernels)
    torch.manual_seed(0)
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT_TOKENS)).tolist()
    seconds: dict[str, list[float]] = {}
    with RolloutEngine(settings) as engine:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        policy = Policy(model, scheme, ignore, align="model", kernels=kernels)
        delta = max(one_round(engine, policy, prompts, version, seconds) for version in range(rounds + 1))
        weights = sum(p.nbytes for _, p in engine.model().named_parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    linears = [module for module in model.modules() if isinstance(module, QuantLinear)]
    counted = {what: values[1:] for what, values in seconds.items()}
    return {
        "kernels": kernels,
        "kernel": sorted({layer.kernel.name for layer in linears}),
        "cpu_seconds": counted,
        "peak_mib": peak,
        "engine_parameters_mib": weights / 2**20,
        "delta_abs_max": delta,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/dequantized_cpu.json"))
    parser.add_argument("--one", nargs=2, metavar=("KERNELS", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(launch(args.one[0], Path(args.one[1]), args.rounds)))
        return 0
    from qarl.checkpoint.json_file import write_json
    from qarl.metrics.tracker import write_versions

    found: dict[str, list[dict[str, Any]]] = {kernels: [] for kernels in KERNELS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        make_model(folder)
        for _ in range(args.launches):
            for kernels in KERNELS:
                command = [sys.executable, __file__, "--rounds", str(args.rounds), "--one", kernels, str(folder)]
                run = subprocess.run(
                    command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
                )
                found[kernels].append(json.loads(run.stdout.splitlines()[-1]))
                print(kernels, found[kernels][-1], flush=True)
        write_versions(Path(temporary))
        versions = json.loads((Path(temporary) / "versions.json").read_text())
    table = {kernels: _medians(launches) for kernels, launches in found.items()}
    sizes = {"vocabulary": VOCABULARY, "group_size": GROUP, "prompts": PROMPTS, "prompt_tokens": PROMPT_TOKENS}
    document = {
        "command": f"python scripts/dequantized_speed.py --launches {args.launches} --rounds {args.rounds}",
        "model": "SmolLM2-135M, random weights",
        "sizes": sizes | {"new_tokens": NEW_TOKENS},
        "threads": 1,
        "versions": versions,
        "medians": table,
        "launches": found,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.output, document)
    print(json.dumps(table, indent=1))
    return 0


def _medians(launches: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = {
        what: statistics.median(value for one in launches for value in one["cpu_seconds"][what])
        for what in launches[0]["cpu_seconds"]
    }
    return {
        "cpu_seconds": seconds,
        "peak_mib": statistics.median(one["peak_mib"] for one in launches),
        "engine_parameters_mib": launches[0]["engine_parameters_mib"],
        "delta_abs_max": max(one["delta_abs_max"] for one in launches),
    }


if __name__ == "__main__":
    raise SystemExit(main())
