"""The mismatch by alignment level if two workers share the rollout engine: mean and largest |δ| against a real vLLM.

    python scripts/tensor_parallel.py --output benchmarks/results/tensor_parallel_cpu.json
    python scripts/tensor_parallel.py --configs quickstart.yaml --schemes w4a16 --workers 1 2 --output out.json

For each config, scheme and number of workers, an engine samples responses to `--prompts` evaluation prompts at
temperature 1 from published weights. Trainers at `off`, `linears` and `model` compute the log-probs of the same tokens.
With several workers a run at `model` or `exact` falls back to `linears`; the row `model` is what it would have without.
A second publish, of other weights, and the first again must bring back the first samples, bit for bit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from workers_engine import WorkersEngine

from qarl.align.model import resolve_level
from qarl.checkpoint.json_file import write_json
from qarl.checks.registry import RunInputs
from qarl.checks.sampling import sampling_config
from qarl.config import Config, load_config
from qarl.diagnose.diagnosis import with_quant
from qarl.metrics.mismatch import mismatch_metrics
from qarl.metrics.tracker import write_versions
from qarl.rollout.engine import RolloutBatch, RolloutEngine
from qarl.trainer.batch import make_batch
from qarl.trainer.policy import Policy
from qarl.trainer.setup import engine_config

LEVELS = ("off", "linears", "model")


def sample(engine: RolloutEngine, config: Config, prompts: list[list[int]]) -> RolloutBatch:
    return engine.generate(prompts, sampling_config(config), list(range(len(prompts))))


@torch.no_grad()
def mismatch(policy: Policy, rollout: RolloutBatch) -> dict[str, Any]:
    zeros = torch.zeros(len(rollout.response_token_ids))
    batch = make_batch(rollout, zeros, zeros, pad_token_id=0)
    log_probs = policy.response_log_probs(batch, slice(None), temperature=1.0)
    found = mismatch_metrics(log_probs, batch.rollout_log_probs, batch.response_mask)
    return {name: found[f"mismatch/{name}"] for name in ("abs_mean", "abs_max", "k3")}


def measure(config: Config, workers: int, count: int) -> dict[str, Any]:
    prompts = [prompt.prompt_token_ids for prompt in RunInputs(config).val_prompts][:count]
    policy = Policy.load(with_quant(config, align="linears"))
    with WorkersEngine(engine_config(config, level=policy.align), workers) as engine:
        first = published(policy)
        engine.publish(first, version=1)
        samples = sample(engine, config, prompts)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.01)
        policy.requantize()
        engine.publish(published(policy), version=2)
        others = sample(engine, config, prompts)
        engine.publish(first, version=3)
        again = sample(engine, config, prompts)
    assert samples.rollout_log_probs == again.rollout_log_probs != others.rollout_log_probs, "A, B, A"
    hf_config = AutoConfig.from_pretrained(config.model.path)
    level, reasons = resolve_level(hf_config, "exact", device_type="cpu", kernels=set(), workers=workers)
    levels = [name for name in LEVELS if name != "linears" or policy.scheme.quantized]
    return {
        "model": Path(config.model.path).name,
        "scheme": policy.scheme.name,
        "workers": workers,
        "tokens": sum(map(len, samples.response_token_ids)),
        "mismatch": {name: mismatch(Policy.load(with_quant(config, align=name)), samples) for name in levels},
        "exact_becomes": level,
        "why": list(reasons),
    }


def published(policy: Policy) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) for name, tensor in policy.quantize()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--configs", nargs="+", default=["quickstart.yaml", "quickstart_moe.yaml"])
    parser.add_argument("--schemes", nargs="+", default=["bf16", "w4a16", "w8a8", "fp8"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=96)
    args = parser.parse_args(argv)
    rows = []
    for name in args.configs:
        for scheme in args.schemes:
            for workers in args.workers:
                config = load_config([f"config={name}", f"quant.scheme={scheme}", "rollout.router_replay=off"])
                rows.append(measure(config, workers, args.prompts))
                print(json.dumps(rows[-1]), flush=True)
    setting = {"prompts": args.prompts, "configs": args.configs}
    with tempfile.TemporaryDirectory() as folder:
        versions = json.loads(write_versions(folder).read_text())
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    write_json(args.output, {"date": date, "versions": versions, "setting": setting, "rows": rows})


if __name__ == "__main__":
    main()
